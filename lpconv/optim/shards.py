"""What of a parameter is on this rank, as flat tensors that a kernel can run over."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lpconv.errors import UnsupportedError
from lpconv.optim.kernel import Parts

__all__ = ["all_finite", "flat_gradient", "flat_parts", "local"]


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor on this rank (sharing its memory), and any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat_gradient(p: Tensor, name: str) -> Tensor:
    """The local gradient of `p` as a 1-D tensor; raises UnsupportedError where it is sparse or complex."""
    gradient = p.grad
    assert gradient is not None
    if gradient.layout != torch.strided or not gradient.is_floating_point():
        raise UnsupportedError(
            f"parameter `{name}` has a {gradient.layout} gradient of {gradient.dtype}",
            hint="make it dense (for embeddings: sparse=False)",
        )
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and gradient.placements != p.placements:
        gradient = gradient.redistribute(p.device_mesh, p.placements)
    return local(gradient).reshape(-1)


@contextmanager
def flat_parts(parts: Parts) -> Iterator[Parts]:
    """The local parts as 1-D tensors. Parts that are not contiguous are copied, and copied back on leaving."""
    locals_ = tuple(tuple(local(t) for t in tensors) for tensors in parts)
    flats = tuple(tuple(t.reshape(-1) for t in tensors) for tensors in locals_)
    yield flats
    for tensors, flat in zip(locals_, flats, strict=True):
        for t, f in zip(tensors, flat, strict=True):
            if t.data_ptr() != f.data_ptr():
                t.copy_(f.view(t.shape))


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether no gradient on any rank has Inf or NaN: their sums say it, unless a sum overflows, which counts as Inf.

    Waits for the device. With torch.distributed running all ranks must call it together, and they get one answer.
    """
    if not gradients:
        return True
    sums = torch.stack([g.sum(dtype=torch.float32).to(gradients[0].device) for g in gradients])
    finite = sums.isfinite().all().to(torch.float32)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
