"""Rescaling: the same value with its data brought near 1, a power of two moving into the scale (Scalify §3.3, Alg. 4).

`dynamic_rescale` acts on the forward pass, `dynamic_rescale_grad` on the gradient at the same place. The scale that
results lives on the device, so nothing waits for it. `set_scale` moves to a scale that is known beforehand.
"""

from torch import Tensor

from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.scaled import ops
from lpconv.scaled.rules.own import STATISTICS
from lpconv.scaled.scales import ratio, times
from lpconv.scaled.tensor import ScaledTensor

__all__ = ["dynamic_rescale", "dynamic_rescale_grad", "set_scale"]


def dynamic_rescale(x: Tensor, statistic: str = "l2") -> Tensor:
    """`x` with its data brought near 1 by "max", "l1" or "l2"; the gradient passes. A plain tensor stays as it is."""
    find("statistic", statistic, STATISTICS)
    return ops.rebalance(x, statistic, "") if isinstance(x, ScaledTensor) else x


def dynamic_rescale_grad(x: Tensor, statistic: str = "l2") -> Tensor:
    """`x` unchanged; its gradient has its data brought near 1. A plain tensor stays as it is."""
    find("statistic", statistic, STATISTICS)
    return ops.rebalance(x, "", statistic) if isinstance(x, ScaledTensor) else x


def set_scale(x: ScaledTensor, scale: float) -> ScaledTensor:
    """`x` at a given static scale, without gradient: (d·s/scale, scale); scale 0 makes it a zero of any scale.

    The value stays, but for rounding in the dtype of the data. Raises `UsageError` for a negative scale.
    """
    if scale < 0:
        raise UsageError(f"a scale is not negative: {scale}", hint="keep the sign in the data")
    data = times(x.data_part, ratio(x.scale, float(scale)))
    return ScaledTensor(data, float(scale), x.role, x.numerics)
