"""The processes that train together: one, or those that torchrun starts; and their gradients, averaged in fp32.

torch's DistributedDataParallel adds up gradients in their own dtype, and knows nothing of scales. So models with scaled
gradients, and models with 16-bit weights, are not wrapped in it; their gradients are averaged here, between backward
pass and optimizer.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpconv.scaled import ScaledTensor, scaled_tensor, scaling_of

__all__ = ["average_gradients", "backend", "is_main_process", "needs_averaging", "num_processes", "wait_for_all"]


def is_main_process() -> bool:
    """Whether this process writes; of several, only the first does."""
    return bool(_state().is_main_process)


def num_processes() -> int:
    """How many there are."""
    return int(_state().num_processes)


def wait_for_all() -> None:
    """Until all processes are here."""
    _state().wait_for_everyone()


def backend() -> str | None:
    """What they talk through: gloo on CPUs, torch's choice on GPUs, None for one process."""
    return "gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.cuda.is_available() else None


def _state() -> Any:
    """accelerate's shared state, made on first use, which is what joins the processes."""
    from accelerate import PartialState  # seconds to import, and needed by no --help

    options = {"backend": backend()} if backend() else {}
    return PartialState(cpu=not torch.cuda.is_available(), **options)


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
