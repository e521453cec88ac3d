"""A loss scale that stays."""

import math

from lpconv.errors import UsageError
from lpconv.loss_scale.base import LossScale


class ConstantLossScale(LossScale):
    """The same factor at every step (Micikevicius et al. 2018, arXiv 1710.03740, §3.2); overflows only skip steps."""

    name = "constant"

    def __init__(self, *, scale: float) -> None:
        if not 0 < scale < math.inf:
            raise UsageError(f"a loss scale of {scale}", hint="a loss scale is a finite number above 0, such as 1024")
        super().__init__(float(scale))

    def _next(self, found_nonfinite: bool, max_gradient: float | None) -> float:
        return self.scale


class NoLossScale(ConstantLossScale):
    """The loss as it is."""

    name = "none"

    def __init__(self) -> None:
        super().__init__(scale=1.0)
