"""Our own ops: the few places where scaled tensors do something that ATen has no op for.

They are custom ops, so that autograd and `torch.compile` see one opaque call and the rules table decides what it does
to (data, scale), as for any ATen op. On plain tensors each returns a copy of its input.
"""

from typing import Any

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError


@torch.library.custom_op("lpconv::leave", mutates_args=())
def leave(x: Tensor, unit: Tensor, dynamic: bool) -> Tensor:
    """The value of `x` as a plain tensor of its dtype; the backward pass re-enters with `seed(grad, unit, dynamic)`."""
    return x.clone()


@torch.library.custom_op("lpconv::seed", mutates_args=())
def seed(grad: Tensor, unit: Tensor, dynamic: bool) -> Tensor:
    """The plain gradient of an output as a scaled one, in the numerics of the scaled tensor `unit`."""
    return grad.clone()


@torch.library.custom_op("lpconv::rebalance", mutates_args=())
def rebalance(x: Tensor, forward: str, backward: str) -> Tensor:
    """`x` with its data brought near 1 by the statistic `forward`, its gradient by `backward`; "" does nothing."""
    return x.clone()


@torch.library.custom_op("lpconv::as_exact", mutates_args=())
def as_exact(x: Tensor) -> Tensor:
    """`x` marked as never to be cast below its dtype: as an operand, and as what autograd saves of it."""
    return x.clone()


@torch.library.custom_op("lpconv::recentre", mutates_args=())
def recentre(x: Tensor, forward: float, backward: float) -> Tensor:
    """`x` with its scale multiplied by `forward` and its gradient's by `backward`; the data take the inverse."""
    return x.clone()


def _recentre_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.backward_factor = inputs[2]


def _recentre_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return recentre(grad, ctx.backward_factor, 1.0), None, None


def _leave_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dynamic = inputs[2]


def _leave_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError(
            "double backward through a scaled model: the rules have no second derivatives",
            hint="call backward without create_graph, or differentiate the model before `scaled`",
        )
    return seed(grad, ctx.saved_tensors[0], ctx.dynamic), None, None


def _rebalance_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.backward_statistic = inputs[2]


def _rebalance_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return (rebalance(grad, ctx.backward_statistic, "") if ctx.backward_statistic else grad), None, None


leave.register_autograd(_leave_backward, setup_context=_leave_context)
rebalance.register_autograd(_rebalance_backward, setup_context=_rebalance_context)
recentre.register_autograd(_recentre_backward, setup_context=_recentre_context)
as_exact.register_autograd(lambda ctx, grad: grad)
