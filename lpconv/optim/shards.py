"""What of a parameter is on this rank, as flat tensors that a kernel can run over."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lpconv.errors import UnsupportedError
from lpconv.optim.storage import Parts
from lpconv.shards import local


def local_gradient(p: Tensor, name: str) -> Tensor:
    """The local part of the gradient of `p`; raises UnsupportedError where it is sparse or complex."""
    gradient = p.grad
    assert gradient is not None
    if gradient.layout != torch.strided or not gradient.is_floating_point():
        raise UnsupportedError(
            f"parameter `{name}` has a {gradient.layout} gradient of {gradient.dtype}",
            hint="make it dense (for embeddings: sparse=False)",
        )
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and gradient.placements != p.placements:
        gradient = gradient.redistribute(p.device_mesh, p.placements)
    return local(gradient)


@contextmanager
def flat_parts(parts: Parts) -> Iterator[Parts]:
    """The local parts of a parameter as 1-D contiguous tensors: views, or copies that are copied back on leaving."""
    sources = [[local(t) for t in tensors] for tensors in parts]
    flats = tuple(tuple(flat(t) for t in tensors) for tensors in sources)
    yield flats
    for source, one in ((s, f) for many in zip(sources, flats, strict=True) for s, f in zip(*many, strict=True)):
        if not source.is_contiguous():
            source.copy_(one.view(source.shape))


def flat(t: Tensor) -> Tensor:
    """`t` as a 1-D contiguous tensor: a view where it is contiguous."""
    return t if t.dim() == 1 and t.is_contiguous() else t.reshape(-1)


def all_finite(gradients: Sequence[Tensor], device: torch.device) -> bool:
    """Whether no gradient on any rank has Inf or NaN: their sums say it, unless a sum overflows, which counts as Inf.

    Waits for `device`, where the flags meet. With torch.distributed running all ranks must call it together, those
    without gradients too, and they get one answer.
    """
    sums = [g.sum(dtype=torch.float32).to(device) for g in gradients]
    finite = torch.stack([torch.zeros((), device=device), *sums]).isfinite().all().to(torch.float32)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
