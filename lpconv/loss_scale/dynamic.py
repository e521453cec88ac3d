"""The dynamic loss scale: grow while nothing overflows, back off when something does."""

import math
from collections.abc import Mapping

import torch

from lpconv.errors import UsageError
from lpconv.loss_scale.base import LossScale
from lpconv.loss_scale.floor import Floor


class DynamicLossScale(LossScale):
    """The rules of `torch.amp.GradScaler`, step for step, with its names and defaults.

    A non-finite step multiplies the scale by `backoff_factor`; `growth_interval` finite steps in a row multiply it by
    `growth_factor`, if the result is finite in fp32. The scale is rounded to fp32, as GradScaler's is. Two departures:
    it never falls below 2^-126, where GradScaler goes on to 0 and cannot return; and it never falls below `floor`,
    which may rise (see `Floor.of` for how to write one).
    """

    name = "dynamic"
    remembers = ("_num_finite_in_a_row",)

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        floor: Floor | float | str | Mapping[int, float] | None = None,
    ) -> None:
        if not 0 < init_scale < math.inf:
            raise UsageError(f"init_scale={init_scale}", hint="a loss scale is a finite number above 0")
        if not 1 < growth_factor < math.inf or not 0 < backoff_factor < 1:
            raise UsageError(
                f"growth_factor={growth_factor}, backoff_factor={backoff_factor}",
                hint="the first is above 1 and the second between 0 and 1; GradScaler uses 2 and 0.5",
            )
        if growth_interval < 1:
            raise UsageError(f"growth_interval={growth_interval}", hint="a number of steps, at least 1")
        self.floor = Floor.of(floor)
        super().__init__(max(_fp32(init_scale), self.floor.at(0)))
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._num_finite_in_a_row = 0

    def _next(self, found_nonfinite: bool, max_gradient: float | None) -> float:
        scale = self.scale
        self._num_finite_in_a_row = 0 if found_nonfinite else self._num_finite_in_a_row + 1
        if found_nonfinite:
            scale = _fp32(scale * self.backoff_factor)
        elif self._num_finite_in_a_row == self.growth_interval:
            self._num_finite_in_a_row = 0
            grown = _fp32(scale * self.growth_factor)
            scale = grown if math.isfinite(grown) else scale
        return max(scale, self.floor.at(self.num_updates))


def _fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))
