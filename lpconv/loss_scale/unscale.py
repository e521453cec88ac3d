"""Division of gradients by the loss scale."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lpconv.errors import UnsupportedError, UsageError
from lpconv.shards import local


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
