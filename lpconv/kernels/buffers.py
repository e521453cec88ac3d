"""Scratch memory that is kept: the first touch of fresh memory costs as much as what the kernels do with it."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

_MOST = 1 << 25  # bytes of an operand whose memory is kept: of larger ones the product takes longer, too


class Buffers(threading.local):
    """Tensors that each thread makes once for a device, by `make`, and keeps. Their contents are whatever was left."""

    def __init__(self, make: Callable[[torch.device], tuple[Tensor, ...]]) -> None:
        self._make = make
        self._made: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """This thread's tensors on `device`."""
        if device not in self._made:
            with torch.inference_mode(False):  # else, first made there, they could not be written elsewhere
                self._made[device] = self._make(device)
        return self._made[device]


class _Operands(threading.local):
    """Each thread's memory of operands by name, as large as the largest so far."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}


_OPERANDS = _Operands()


def operand(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor on the CPU for what is used up before the next of that `name` in this thread."""
    size_bytes = shape.numel() * dtype.itemsize
    if size_bytes > _MOST or torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype)
    kept = _OPERANDS.kept.get(name)
    if kept is None or len(kept) < size_bytes:
        with torch.inference_mode(False):  # as above
            kept = _OPERANDS.kept[name] = torch.empty(size_bytes, dtype=torch.uint8)
    return kept[:size_bytes].view(dtype).view(shape)


def operand_like(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same shaped and, where one of the two is row-major, laid out like the matrix `x` or its transpose."""
    if x.device.type != "cpu":
        return torch.empty_like(x, dtype=dtype)
    is_turned = not x.is_contiguous() and x.mT.is_contiguous()
    return operand(name, x.mT.shape, dtype).mT if is_turned else operand(name, x.shape, dtype)
