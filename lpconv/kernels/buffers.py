"""Reused scratch memory: the first touch of fresh memory costs as much as the kernels' work on it."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lpconv.kernels.compiled import is_compiling

_MOST = 1 << 25  # largest operand whose memory is reused, in bytes; for larger ones the product dominates


class Buffers(threading.local):
    """Tensors that each thread creates once per device with `make`, and reuses. Their contents are arbitrary."""

    def __init__(self, make: Callable[[torch.device], tuple[Tensor, ...]]) -> None:
        self._make = make
        self._made: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """This thread's tensors on `device`."""
        if device not in self._made:
            with torch.inference_mode(False):  # tensors created in inference mode cannot be written outside it
                self._made[device] = self._make(device)
        return self._made[device]


class _Operands(threading.local):
    """Each thread's operand memory by name, as large as the largest operand so far."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}


_OPERANDS = _Operands()


def operand(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor that is valid until this thread's next operand of that `name`."""
    size_bytes = shape.numel() * dtype.itemsize
    if size_bytes > _MOST or is_compiling():
        return torch.empty(shape, dtype=dtype)
    memory = _OPERANDS.kept.get(name)
    if memory is None or len(memory) < size_bytes:
        with torch.inference_mode(False):  # tensors created in inference mode cannot be written outside it
            memory = _OPERANDS.kept[name] = torch.empty(size_bytes, dtype=torch.uint8)
    return memory[:size_bytes].view(dtype).view(shape)


def operand_like(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`operand` with the shape of the matrix `x`, and its layout if `x` or its transpose is row-major."""
    if x.device.type != "cpu":
        return torch.empty_like(x, dtype=dtype)
    is_turned = not x.is_contiguous() and x.mT.is_contiguous()
    return operand(name, x.mT.shape, dtype).mT if is_turned else operand(name, x.shape, dtype)
