"""lpconv's own ops and their rules: converting to and from plain tensors, rescaling by data, marking as exact.

As custom ops they are opaque calls for autograd and `torch.compile`, and their rules define the effect on (data,
scale), as for any ATen op. On plain tensors each op returns a copy of its input.
"""

from typing import Any

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.formats.scale import pow2_floor
from lpconv.kernels.compiled import is_compiling
from lpconv.scaled.pair import Call, Role, Rule, Scaled, pair, value, widen_16_bit
from lpconv.scaled.scales import MAX_SCALE, MIN_SCALE, multiply, times

STATISTICS = {
    "max": lambda data: data.abs().amax(),
    "l1": lambda data: data.abs().mean(),
    "l2": lambda data: data.square().mean().sqrt(),
}
SMALLEST_NORM = 2.0**-14  # 2^⌊log2 1e-4⌋: all-zero data lower the scale by this much and no more


@torch.library.custom_op("lpconv::leave", mutates_args=())
def leave(x: Tensor, unit: Tensor, dynamic: bool) -> Tensor:
    """The value of `x` as a plain tensor of its dtype; the backward pass calls `seed(grad, unit, dynamic)`."""
    return x.clone()


@torch.library.custom_op("lpconv::seed", mutates_args=())
def seed(grad: Tensor, unit: Tensor, dynamic: bool) -> Tensor:
    """Convert the plain gradient of an output into a scaled one, with the numerics of the scaled tensor `unit`."""
    return grad.clone()


@torch.library.custom_op("lpconv::rebalance", mutates_args=())
def rebalance(x: Tensor, forward: str, backward: str) -> Tensor:
    """Rescale the data of `x` to near 1 by statistic `forward`, its gradient's by `backward`; "" does nothing."""
    return x.clone()


@torch.library.custom_op("lpconv::as_exact", mutates_args=())
def as_exact(x: Tensor) -> Tensor:
    """Mark `x` as never to be cast below its dtype, neither as an operand nor when saved for the backward pass."""
    return x.clone()


@torch.library.custom_op("lpconv::recentre", mutates_args=())
def recentre(x: Tensor, forward: float, backward: float) -> Tensor:
    """`x` with its scale multiplied by `forward` and its gradient's by `backward`; the data are divided by them."""
    return x.clone()


def _keep_third(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the third argument, which says what happens to the gradient."""
    ctx.for_backward = inputs[2]


def _recentre_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return recentre(grad, ctx.for_backward, 1.0), None, None


def _leave_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dynamic = inputs[2]


def _leave_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    if torch.is_grad_enabled() and not is_compiling():
        raise UnsupportedError(
            "a scaled model does not support double backward: its rules have no second derivatives",
            hint="call backward without create_graph, or differentiate the model before `scaled`",
        )
    return seed(grad, ctx.saved_tensors[0], ctx.dynamic), None, None


def _rebalance_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return (rebalance(grad, ctx.for_backward, "") if ctx.for_backward else grad), None, None


leave.register_autograd(_leave_backward, setup_context=_leave_context)
rebalance.register_autograd(_rebalance_backward, setup_context=_keep_third)
recentre.register_autograd(_recentre_backward, setup_context=_keep_third)
as_exact.register_autograd(lambda ctx, grad: grad)


def rebalance_pair(x: Scaled, statistic: str, *, smallest: float = SMALLEST_NORM, headroom: float = 1.0) -> Scaled:
    """(d/n, s·n) with n = max(2^⌊log2 stat(d)⌋, smallest) [Scalify Algorithm 4]; data with Inf or NaN keep their scale.

    `statistic` is "max", "l1" (mean magnitude) or "l2" (root mean square), computed in fp32. The new scale is a 0-dim
    fp32 tensor; n is bounded so that it stays in [2^-126, 2^127]. With `headroom`, the statistic becomes 1/headroom
    instead of 1.
    """
    if not x.data.numel():
        return x
    norm = pow2_floor(STATISTICS[statistic](widen_16_bit(x.data)).float()) * headroom
    norm = torch.where(norm.isfinite(), norm.clamp(min=smallest), 1.0)
    old = x.scale if isinstance(x.scale, Tensor) else torch.full_like(norm, x.scale)
    norm = torch.where(old > 0, norm.clamp(MIN_SCALE / old, MAX_SCALE / old), norm)
    return Scaled(times(x.data, 1 / norm), old * norm, x.role)


def _rebalance(call: Call, x: Scaled, forward: str, backward: str) -> Scaled:
    """`rebalance_pair` by the forward statistic, if any; gradients use the headroom of the numerics."""
    if not forward:
        return x
    return rebalance_pair(x, forward, headroom=call.numerics.headroom if x.role is Role.GRADIENT else 1.0)


def _leave(call: Call, x: Any, unit: Any, dynamic: bool) -> Any:
    """value(x), in its dtype; a copy of a plain x."""
    return value(x).to(x.data.dtype) if isinstance(x, Scaled) else x.clone()


def _seed(call: Call, grad: Any, unit: Any, dynamic: bool) -> Scaled:
    """(g/s, s) with s = 2^⌊log2 max|g|⌋, so that a factor on the loss moves into the scale and cannot underflow.

    1/s is usually called the loss scale. Eager static methods read max|g| once per output and backward pass; with
    `dynamic` the scale stays on the device. A compiled static graph can do neither, so s = 1. The headroom h of the
    numerics lowers the data: (g/(s·h), s·h).
    """
    data, scale = pair(grad)
    start = Scaled(data, scale, Role.GRADIENT)
    if dynamic:
        start = rebalance_pair(start, "max", smallest=MIN_SCALE)
    elif data.numel() and isinstance(scale, float) and not is_compiling():
        amax = float(data.abs().amax())
        own = pow2_floor(amax) if MIN_SCALE <= amax <= MAX_SCALE else 1.0
        start = Scaled(times(data, 1 / own), own * scale, Role.GRADIENT)
    headroom = call.numerics.headroom
    return Scaled(times(start.data, 1 / headroom), multiply(start.scale, headroom), Role.GRADIENT)


def _recentre(call: Call, x: Scaled, forward: float, backward: float) -> Scaled:
    """(d/f, s·f) for a static power of two f."""
    return Scaled(times(x.data, 1 / forward), multiply(x.scale, forward), x.role)


OPS: dict[Rule, tuple[Any, ...]] = {
    _leave: (leave._opoverload,),
    _seed: (seed._opoverload,),
    _rebalance: (rebalance._opoverload,),
    lambda call, x: Scaled(x.data, x.scale, Role.EXACT): (as_exact._opoverload,),
    _recentre: (recentre._opoverload,),
}
