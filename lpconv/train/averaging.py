"""Gradients averaged over processes in fp32, for those that torch's DistributedDataParallel does not average well.

It adds up gradients in their own dtype, and knows nothing of scales. So models with scaled gradients, and models with
16-bit weights, are not wrapped in it; their gradients are averaged here, between backward pass and optimizer.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpconv.scaled import ScaledTensor, scaled_tensor, scaling_of

__all__ = ["average_gradients", "needs_averaging"]

_MIN_SCALE = 2.0**-126  # stands for the scale of a gradient that is known to be zero


def needs_averaging(model: nn.Module) -> bool:
    """Whether the gradients of a model are to be averaged here."""
    return scaling_of(model) is not None or any(p.dtype != torch.float32 for p in model.parameters())


@torch.no_grad()
def average_gradients(parameters: Iterable[Any]) -> None:
    """Replace each gradient by its mean over all processes, which must hold gradients of the same parameters.

    The sum is taken in fp32 and rounded once, to the dtype of the gradient. Scaled gradients are first brought to the
    largest scale that any process has for them; scales are powers of two, so that this is exact, and no mean is larger
    than the largest of its terms. Inf and NaN of one process reach all.
    """
    holders = [p for p in parameters if p.grad is not None]
    if not holders:
        return
    own = torch.stack([_scale(p.grad) for p in holders])
    common = own.clone()
    dist.all_reduce(common, op=dist.ReduceOp.MAX)
    shares = own / common / dist.get_world_size()
    for parameter, share, scale in zip(holders, shares.unbind(), common.unbind(), strict=True):
        gradient = parameter.grad
        is_scaled = isinstance(gradient, ScaledTensor)
        data = gradient.data_part if is_scaled else gradient
        mean = data.float() * share
        dist.all_reduce(mean)
        if is_scaled:
            parameter.grad = scaled_tensor(
                mean.to(data.dtype), scale.clone(), role=gradient.role, numerics=gradient.numerics
            )
        else:
            gradient.copy_(mean)


def _scale(gradient: Tensor) -> Tensor:
    """In fp32 on the gradient's device; 1 for a plain one."""
    scale = gradient.scale if isinstance(gradient, ScaledTensor) else 1.0
    return torch.as_tensor(scale, dtype=torch.float32, device=gradient.device).clamp(min=_MIN_SCALE)
