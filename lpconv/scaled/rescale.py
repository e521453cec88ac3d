"""Rescaling: the same value with data near 1, by moving a power of two into the scale (Scalify §3.3, Alg. 4).

`dynamic_rescale` acts on the forward pass, `dynamic_rescale_grad` on the gradient at the same place. The resulting
scale stays on the device, so nothing waits for it.
"""

from torch import Tensor

from lpconv.lookup import find
from lpconv.scaled import ops
from lpconv.scaled.rules.own import STATISTICS
from lpconv.scaled.tensor import ScaledTensor


def dynamic_rescale(x: Tensor, statistic: str = "l2") -> Tensor:
    """Return `x` with data rescaled to near 1 by a "max", "l1" or "l2" statistic; gradients pass unchanged."""
    find("statistic", statistic, STATISTICS)
    return ops.rebalance(x, statistic, "") if isinstance(x, ScaledTensor) else x


def dynamic_rescale_grad(x: Tensor, statistic: str = "l2") -> Tensor:
    """Return `x` unchanged, and rescale the data of its gradient to near 1 in the backward pass."""
    find("statistic", statistic, STATISTICS)
    return ops.rebalance(x, "", statistic) if isinstance(x, ScaledTensor) else x
