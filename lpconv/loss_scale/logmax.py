"""A loss scale that predicts the largest gradient of the next step, instead of waiting for it to overflow."""

import math
from collections.abc import Mapping

from lpconv.errors import UsageError
from lpconv.loss_scale.base import LossScale
from lpconv.loss_scale.floor import Floor

_EDGE = 16.0  # log2 of where fp16 overflows; e5m2 ends there too, but for rounding
_QUANTILE = 3.09  # of the normal distribution: a chance of 0.1 % to lie above
_BETA_MEAN, _BETA_DEVIATION = 0.99, 0.999


class LogMaxLossScale(LossScale):
    """LogMax ("log-normal") scaling of OpenSeq2Seq, with its overflow rule corrected.

    x = log2 of the largest unscaled gradient is taken as normal, with μ a moving average of x (β = 0.99) and σ² that of
    x² less the square of that of x (β = 0.999), all corrected for their start at zero. Then

        scale = 2^⌊16 − (μ + 3.09·σ)⌋, within [smallest, largest] and not below `floor`.

    Departures: after an overflow OpenSeq2Seq takes x = 2^16 where log2 of it is meant, and needs 13,000 steps to come
    back. Here x is one binade above what the scale would have held, and the averages begin anew from it: an overflow
    has a chance of 0.1 %, so one means that the gradients have moved. σ is at least half a binade, for the same reason
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
                f"smallest={smallest}, init_scale={init_scale}, largest={largest}",
                hint="three finite scales above 0, in rising order",
            )
        if not 0 <= min_deviation < math.inf:
            raise UsageError(f"min_deviation={min_deviation}", hint="a number of binades, 0 or more")
        self.floor = Floor.of(floor)
        super().__init__(max(init_scale, self.floor.at(0)))
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
        scale = min(max(self._predicted(), self.smallest), self.largest) if self._num_observed else self.scale
        return max(scale, self.floor.at(self.num_updates))

    def _forget(self) -> None:
        self._num_observed = 0
        self._recent_mean = self._mean = self._mean_square = 0.0

    def _observe(self, x: float) -> None:
        self._num_observed += 1
        self._recent_mean += (1 - _BETA_MEAN) * (x - self._recent_mean)
        self._mean += (1 - _BETA_DEVIATION) * (x - self._mean)
        self._mean_square += (1 - _BETA_DEVIATION) * (x * x - self._mean_square)

    def _predicted(self) -> float:
        weight_mean = 1 - _BETA_MEAN**self._num_observed
        weight_deviation = 1 - _BETA_DEVIATION**self._num_observed
        variance = self._mean_square / weight_deviation - (self._mean / weight_deviation) ** 2
        deviation = max(math.sqrt(max(variance, 0.0)), self.min_deviation)
        exponent = _EDGE - self._recent_mean / weight_mean - _QUANTILE * deviation
        return math.exp2(min(math.floor(exponent), 127))
