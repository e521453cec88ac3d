"""What of a parameter is on this rank, as flat tensors that a kernel can run over."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lpconv.errors import UnsupportedError
from lpconv.optim.storage import Parts

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
    gradient = local(gradient)
    return gradient if gradient.dim() == 1 and gradient.is_contiguous() else gradient.reshape(-1)


@contextmanager
def flat_parts(many: Sequence[Parts]) -> Iterator[Parts]:
    """The local parts of one or several parameters as 1-D tensors, one after the other.

    The parts of a single contiguous parameter are views. Others are copied, and copied back on leaving.
    """
    flats, copies = [], []
    for quantity in zip(*many, strict=True):
        joined = []
        for tensors in zip(*quantity, strict=True):
            sources = [_flat(local(t)) for t in tensors]
            if len(sources) == 1 and sources[0].is_contiguous():
                joined.append(sources[0])
                continue
            joined.append(torch.cat([s if s.dim() == 1 else s.reshape(-1) for s in sources]))
            copies.append((sources, joined[-1]))
        flats.append(tuple(joined))
    yield tuple(flats)
    for sources, flat in copies:
        parts = torch.split(flat, [s.numel() for s in sources])
        torch._foreach_copy_(
            sources, [p.view_as(s) if s.dim() != 1 else p for p, s in zip(parts, sources, strict=True)]
        )


def _flat(t: Tensor) -> Tensor:
    """A 1-D view where there is one."""
    return t.view(-1) if t.dim() != 1 and t.is_contiguous() else t


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
