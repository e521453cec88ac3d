"""Custom ops for operations on scaled tensors that ATen lacks.

As custom ops they are opaque calls for autograd and `torch.compile`, and the rules table defines their effect on (data,
scale), as for any ATen op. On plain tensors each returns a copy of its input.
"""

from typing import Any

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.kernels.compiled import is_compiling


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


def _recentre_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.backward_factor = inputs[2]


def _recentre_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return recentre(grad, ctx.backward_factor, 1.0), None, None


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


def _rebalance_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.backward_statistic = inputs[2]


def _rebalance_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return (rebalance(grad, ctx.backward_statistic, "") if ctx.backward_statistic else grad), None, None


leave.register_autograd(_leave_backward, setup_context=_leave_context)
rebalance.register_autograd(_rebalance_backward, setup_context=_rebalance_context)
recentre.register_autograd(_recentre_backward, setup_context=_recentre_context)
as_exact.register_autograd(lambda ctx, grad: grad)
