"""Tensors of a source in the order of the transposes of their matrices, for forms whose file has them so.

Each matrix is read once for all of its blocks: these come one after the other, so a few matrices are held, no more. Who
reads copies from them under a lock, so that the memory of the oldest can be that of the next.
"""

import threading

import torch
from torch import Tensor

from lpconv.checkpoint.dtypes import TORCH_DTYPES
from lpconv.checkpoint.source import Source, read_range
from lpconv.convert.memory import HELD_MATRICES

__all__ = ["TurnedMatrices"]


class TurnedMatrices:
    """Reads from any thread."""

    def __init__(self, source: Source) -> None:
        self._source, self._lock = source, threading.Lock()
        self._held: dict[tuple[str, int], Tensor] = {}  # bytes
        self._raw = torch.empty(0, dtype=torch.uint8)  # a matrix as it lies in the file

    def read(self, name: str, start: int, stop: int, buffer: Tensor) -> Tensor:
        """The elements `start` to `stop` of a tensor whose last two axes are transposed, 1-D, in `buffer`, uint8."""
        info = self._source.entries[name].info
        rows, cols = info.shape[-2:]
        size, dtype = rows * cols, TORCH_DTYPES[info.dtype]
        out = buffer[: (stop - start) * dtype.itemsize].view(dtype)
        for index in range(start // size, -(-stop // size)):
            first, last = max(start, index * size), min(stop, (index + 1) * size)
            with self._lock:
                matrix = self._matrix(name, index, (rows, cols), dtype)
                out[first - start : last - start] = matrix[first - index * size : last - index * size]
        return out

    def _matrix(self, name: str, index: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """One transposed matrix, 1-D."""
        size = shape[0] * shape[1]
        if (name, index) not in self._held:
            is_full = len(self._held) == HELD_MATRICES
            oldest = self._held.pop(next(iter(self._held))) if is_full else torch.empty(0, dtype=torch.uint8)
            room = _room(oldest, size * dtype.itemsize)
            self._raw = _room(self._raw, size * dtype.itemsize)
            found = read_range(self._source, name, index * size, (index + 1) * size, buffer=self._raw)
            room[: size * dtype.itemsize].view(dtype).view(shape[1], shape[0]).copy_(found.view(shape).t())
            self._held[name, index] = room
        return self._held[name, index][: size * dtype.itemsize].view(dtype)


def _room(had: Tensor, size_bytes: int) -> Tensor:
    """So many bytes, or more: those that there are, where they suffice."""
    return had if had.numel() >= size_bytes else torch.empty(size_bytes, dtype=torch.uint8)
