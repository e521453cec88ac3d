"""Tensors in the order that GGUF needs: matrices transposed, or rows of rotary heads in llama.cpp's order."""

from __future__ import annotations  # Tensor is imported for type checking only

from collections.abc import Collection, Mapping
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from lpconv.storage.source import Source, TensorEntry, read_tensor

if TYPE_CHECKING:
    from torch import Tensor

TRANSPOSED = "transposed"


def transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor whose last two axes are swapped."""
    return (*shape[:-2], *shape[-2:][::-1])


def rotary(heads: int) -> str:
    """The order of a tensor with the rows of `heads` heads.

    transformers rotates row i of a head with row i + half of the rows, llama.cpp row 2 i with row 2 i + 1.
    """
    return f"rotary:{heads}"


def arranged(x: Tensor, order: str, *, back: bool = False) -> Tensor:
    """A whole tensor in another order; with `back`, the tensor that was brought into this order."""
    if order == TRANSPOSED:
        return x.mT
    heads = int(order.partition(":")[2])
    halves = x.view(heads, -1, 2, *x.shape[1:]) if back else x.view(heads, 2, -1, *x.shape[1:])
    return halves.transpose(1, 2).reshape(x.shape)


class ArrangedSource:
    """The tensors of a source except `hidden` ones, those in `orders` in another order. Holds the last two of these.

    Closing it closes the source.
    """

    def __init__(self, source: Source, orders: Mapping[str, str], hidden: Collection[str]) -> None:
        self._source, self._orders, self._lock = source, orders, Lock()
        self.entries = {n: self._entry(n, e) for n, e in source.entries.items() if n not in hidden}
        self._held: dict[str, Tensor] = {}

    def _entry(self, name: str, entry: TensorEntry) -> TensorEntry:
        is_transposed = self._orders.get(name) == TRANSPOSED
        return replace(entry, info=replace(entry.info, shape=transposed(entry.info.shape))) if is_transposed else entry

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._orders:
            self._source.read_bytes(name, start, out)
            return
        out[:] = self._bytes_of(name)[start : start + len(out)].numpy().data

    def _bytes_of(self, name: str) -> Tensor:
        import torch

        with self._lock:
            if name not in self._held:
                if len(self._held) > 1:
                    del self._held[next(iter(self._held))]
                whole = arranged(read_tensor(self._source, name), self._orders[name])
                self._held[name] = whole.contiguous().view(-1).view(torch.uint8)
            return self._held[name]

    def close(self) -> None:
        self._held.clear()
        self._source.close()
