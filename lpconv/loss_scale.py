"""Global loss scales: one factor on the loss that keeps small gradients from underflowing in a 16-bit format."""

import inspect
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.lookup import find
from lpconv.shards import local

__all__ = ["LOSS_SCALES", "Floor", "LossScale", "largest_gradient", "make_loss_scale", "unscale_"]

_HISTORY_LENGTH = 10_000  # latest changes kept, for rules that change at every step
_SMALLEST = 2.0**-126  # the smallest normal fp32 number; below it a scale loses digits, then becomes 0 for good
_HINT = "write one scale, or STEP:SCALE pairs with increasing steps, such as 0:1,40000:8192"
_EDGE = 16.0  # log2 of fp16's overflow threshold, and e5m2's except for rounding
_QUANTILE = 3.09  # standard deviations that 0.1 % of a normal distribution exceeds
_BETA_MEAN, _BETA_DEVIATION = 0.99, 0.999


class LossScale(ABC):
    """Base class of loss scales: the factor on the loss of the next step, chosen from the outcome of earlier steps.

        (loss * loss_scale.scale).backward()
        found_nonfinite = unscale_(parameters, loss_scale.scale)
        if not found_nonfinite:
            optimizer.step()
        loss_scale.update(found_nonfinite)

    `history` holds (number of updates, scale from then on) for the start and the latest 10,000 changes.
    """

    name: ClassVar[str]
    remembers: ClassVar[tuple[str, ...]] = ()  # attributes that the rule changes, apart from the scale

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.num_updates = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.history: deque[tuple[int, float]] = deque([(0, scale)], maxlen=_HISTORY_LENGTH)

    def update(self, found_nonfinite: bool, *, max_gradient: float | None = None) -> None:
        """Choose the next scale. Call once per step, whether taken or skipped.

        `found_nonfinite`: the gradients of this step held Inf or NaN, so the optimizer's step was skipped.
        `max_gradient`: the largest magnitude of the unscaled gradients; only "logmax" needs it, in finite steps.
        """
        self.num_updates += 1
        self.num_skipped += found_nonfinite
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if found_nonfinite else 0
        scale = self._next(found_nonfinite, max_gradient)
        if scale != self.scale:
            self.history.append((self.num_updates, scale))
        self.scale = scale

    def state_dict(self) -> dict[str, Any]:
        """The mutable state as JSON-able values, without options."""
        return {
            "name": self.name,
            "scale": self.scale,
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "history": [list(change) for change in self.history],
            "rule": {attribute: getattr(self, attribute) for attribute in self.remembers},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. Raises `InputError`, changing nothing, for the state of another rule."""
        expected = self.state_dict()
        if state.get("name") != self.name or state.keys() != expected.keys():
            raise InputError(
                f"this state belongs to the loss scale `{state.get('name', 'unknown')}`, not to `{self.name}`",
                hint="resume with the loss scale that the run started with",
            )
        if state["rule"].keys() != expected["rule"].keys():
            raise InputError(
                f"the state of the loss scale `{self.name}` is damaged", hint="resume from another checkpoint"
            )
        self.scale = float(state["scale"])
        self.num_updates, self.num_skipped = state["num_updates"], state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
        self.history = deque(((n, s) for n, s in state["history"]), maxlen=_HISTORY_LENGTH)
        for attribute in self.remembers:
            setattr(self, attribute, state["rule"][attribute])

    @abstractmethod
    def _next(self, found_nonfinite: bool, max_gradient: float | None) -> float:
        """The scale of the next step; `num_updates` already includes this one."""


class ConstantLossScale(LossScale):
    """A constant factor (Micikevicius et al. 2018, arXiv 1710.03740, §3.2); overflows only skip steps."""

    name = "constant"

    def __init__(self, *, scale: float) -> None:
        if not 0 < scale < math.inf:
            raise UsageError(
                f"{scale} is not a valid loss scale", hint="pass a finite number above 0, for example 1024"
            )
        super().__init__(float(scale))

    def _next(self, found_nonfinite: bool, max_gradient: float | None) -> float:
        return self.scale


class NoLossScale(ConstantLossScale):
    """A loss scale of 1."""

    name = "none"

    def __init__(self) -> None:
        super().__init__(scale=1.0)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """A schedule of lower bounds for the loss scale: the enhanced loss scaling of Mellempudi et al. (arXiv 1905.12334).

    `starts` are (step, scale) pairs in ascending order of step; each scale holds from its step on. Before the first,
    the floor is the smallest normal number of fp32. Raises `UsageError` for invalid steps or scales.
    """

    starts: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.starts]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise UsageError(f"the steps of a loss-scale floor must increase: {steps}", hint=_HINT)
        for _, scale in self.starts:
            if not _SMALLEST <= scale < math.inf:
                raise UsageError(f"{scale} is not a valid floor for a loss scale", hint=_HINT)

    @classmethod
    def parse(cls, value: "Floor | float | str | Mapping[int, float] | None") -> "Floor":
        """Convert a scale, a mapping from steps to scales, a string such as "0:1,40000:8192", or None for no floor."""
        if isinstance(value, Floor):
            return value
        if value is None:
            return cls()
        if isinstance(value, Mapping):
            return cls(starts=tuple((int(step), float(scale)) for step, scale in value.items()))
        try:
            if isinstance(value, str) and ":" in value:
                pairs = (entry.split(":") for entry in value.split(","))
                return cls(starts=tuple((int(step), float(scale)) for step, scale in pairs))
            return cls(starts=((0, float(value)),))
        except ValueError as error:
            raise UsageError(f"cannot read the loss-scale floor `{value}`", hint=_HINT) from error

    def at_step(self, step: int) -> float:
        """The floor at step number `step`, counted from 0."""
        return next((scale for start, scale in reversed(self.starts) if step >= start), _SMALLEST)


class DynamicLossScale(LossScale):
    """The rules of `torch.amp.GradScaler`, step for step, with its names and defaults.

    A non-finite step multiplies the scale by `backoff_factor`; `growth_interval` finite steps in a row multiply it by
    `growth_factor`, if the result is finite in fp32. The scale is rounded to fp32, like GradScaler's. Two departures:
    it never falls below 2^-126, whereas GradScaler continues to 0 and cannot recover; and it never falls below `floor`,
    which may rise (see `Floor.parse` for the accepted values).
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
            raise UsageError(f"init_scale={init_scale} is not a valid loss scale", hint="pass a finite number above 0")
        if not 1 < growth_factor < math.inf or not 0 < backoff_factor < 1:
            raise UsageError(
                f"growth_factor={growth_factor} or backoff_factor={backoff_factor} is out of range",
                hint="growth_factor is above 1 and backoff_factor between 0 and 1; GradScaler uses 2 and 0.5",
            )
        if growth_interval < 1:
            raise UsageError(
                f"growth_interval={growth_interval} is out of range", hint="pass a number of steps, at least 1"
            )
        self.floor = Floor.parse(floor)
        super().__init__(max(_fp32(init_scale), self.floor.at_step(0)))
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
        return max(scale, self.floor.at_step(self.num_updates))


def _fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


class LogMaxLossScale(LossScale):
    """LogMax ("log-normal") scaling of OpenSeq2Seq, with its overflow rule corrected.

    x = log2 of the largest unscaled gradient is assumed normal, with μ a moving average of x (β = 0.99) and σ² the
    moving average of x² minus the squared moving average of x (both β = 0.999), all corrected for their start at zero.
    Then

        scale = 2^⌊16 − (μ + 3.09·σ)⌋, within [smallest, largest] and not below `floor`.

    Departures: after an overflow OpenSeq2Seq uses x = 2^16 instead of its log2, and needs 13,000 steps to recover. Here
    x is one binade above the scale's largest representable gradient, and the averages restart from it: an overflow has
    a probability of 0.1 %, so it means that the gradients have moved. σ is at least half a binade, for the same reason
    at the start. Scales are powers of two, and `largest` is 2^24, not 2^14.
    """

    name = "logmax"
    remembers = ("_num_observed", "_recent_mean", "_mean", "_mean_square")

    def __init__(
        self,
        *,
        init_scale: float = 2.0**14,
        smallest: float = 1.0,
        largest: float = 2.0**24,
        min_deviation: float = 0.5,
        floor: Floor | float | str | Mapping[int, float] | None = None,
    ) -> None:
        if not 0 < smallest <= init_scale <= largest < math.inf:
            raise UsageError(
                f"smallest={smallest}, init_scale={init_scale}, largest={largest} are not valid loss scales",
                hint="pass three finite numbers above 0 in increasing order",
            )
        if not 0 <= min_deviation < math.inf:
            raise UsageError(
                f"min_deviation={min_deviation} is out of range", hint="pass a number of binades, at least 0"
            )
        self.floor = Floor.parse(floor)
        super().__init__(max(init_scale, self.floor.at_step(0)))
        self.smallest, self.largest, self.min_deviation = smallest, largest, min_deviation
        self._forget()

    def _next(self, found_nonfinite: bool, max_gradient: float | None) -> float:
        if found_nonfinite:
            self._forget()
            self._observe(_EDGE + 1 - math.log2(self.scale))
        elif max_gradient is None or not 0 <= max_gradient < math.inf:
            raise UsageError(
                f"logmax cannot choose a scale from max_gradient={max_gradient}",
                hint="pass update(…, max_gradient=largest_gradient(parameters)), taken after unscaling",
            )
        elif max_gradient > 0:
            self._observe(math.log2(max_gradient))
        scale = min(max(self._predict(), self.smallest), self.largest) if self._num_observed else self.scale
        return max(scale, self.floor.at_step(self.num_updates))

    def _forget(self) -> None:
        self._num_observed = 0
        self._recent_mean = self._mean = self._mean_square = 0.0

    def _observe(self, x: float) -> None:
        self._num_observed += 1
        self._recent_mean += (1 - _BETA_MEAN) * (x - self._recent_mean)
        self._mean += (1 - _BETA_DEVIATION) * (x - self._mean)
        self._mean_square += (1 - _BETA_DEVIATION) * (x * x - self._mean_square)

    def _predict(self) -> float:
        weight_mean = 1 - _BETA_MEAN**self._num_observed
        weight_deviation = 1 - _BETA_DEVIATION**self._num_observed
        variance = self._mean_square / weight_deviation - (self._mean / weight_deviation) ** 2
        deviation = max(math.sqrt(max(variance, 0.0)), self.min_deviation)
        exponent = _EDGE - self._recent_mean / weight_mean - _QUANTILE * deviation
        return math.exp2(min(math.floor(exponent), 127))


LOSS_SCALES: dict[str, type[LossScale]] = {
    kind.name: kind for kind in (NoLossScale, ConstantLossScale, DynamicLossScale, LogMaxLossScale)
}


def make_loss_scale(name: str, **options: Any) -> LossScale:
    """Create the loss scale called `name` (none, constant, dynamic or logmax) with the options of its class.

    Raises `UsageError` for unknown names, unknown or missing options, and values out of range. (Adaptive scaling works
    layer by layer, inside the model: `lpconv.scaled.adaptive_scaling(model)`.)
    """
    kind = find("loss scale", name, LOSS_SCALES)
    parameters = inspect.signature(kind).parameters
    for option in options:
        find(f"option of the loss scale {name}:", option, parameters)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise UsageError(
            f"the loss scale {name} needs a value for {', '.join(missing)}", hint=f"for example {missing[0]}=1024"
        )
    return kind(**options)


@torch.no_grad()
def unscale_(parameters: Iterable[Tensor], scale: float) -> bool:
    """Divide the gradients by `scale` in place and return whether any of them holds Inf or NaN.

    Any floating dtype. In fp16 and bf16 the quotient is rounded: an fp16 gradient below 2^-24 · scale becomes 0 again,
    so keep parameters, and with them gradients, in fp32 if that matters. Parameters without a gradient are skipped.
    Reads one boolean from the device. With torch.distributed running, all ranks must call this together and get the
    same answer. Raises `UsageError` if the scale is not a finite number above 0, `UnsupportedError` for sparse
    gradients.
    """
    if not 0 < scale < math.inf:
        raise UsageError(f"cannot divide gradients by {scale}", hint="pass a finite number above 0")
    parameters = list(parameters)
    flags = []
    for gradient in _local_gradients(parameters):
        if scale != 1:
            gradient.div_(scale)
        flags.append(~gradient.isfinite().all())
    return bool(_max_over_ranks(flags, parameters))


@torch.no_grad()
def largest_gradient(parameters: Iterable[Tensor]) -> float:
    """Return the largest magnitude of finite gradients after `unscale_`, over all ranks; 0 without gradients.

    Reads one number from the device; with torch.distributed running, all ranks must call this together.
    """
    parameters = list(parameters)
    return float(_max_over_ranks([g.abs().amax() for g in _local_gradients(parameters) if g.numel()], parameters))


def _local_gradients(parameters: list[Tensor]) -> list[Tensor]:
    """The part of each gradient that is on this rank."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"cannot unscale a {gradient.layout} gradient",
                hint="make the gradient dense (for embeddings, pass sparse=False)",
            )
        gradients.append(local(gradient))
    return gradients


def _max_over_ranks(numbers: list[Tensor], parameters: list[Tensor]) -> Tensor:
    """Maximum of 0-dim tensors over all ranks, in fp32; 0 without tensors."""
    device = parameters[0].device if parameters else torch.get_default_device()
    largest = torch.stack([torch.zeros((), device=device), *(n.to(device, torch.float32) for n in numbers)]).max()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
