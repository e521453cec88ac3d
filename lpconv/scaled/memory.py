"""Bytes that autograd saves for the backward pass, measured with hooks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.scaled.model import scaling_of
from lpconv.scaled.saved import SavedCodes
from lpconv.scaled.tensor import data_part


def saved_bytes(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Return how many bytes a forward pass on `batch` saves for its backward pass, without the parameters.

    Counted by saved-tensor hooks, for scaled and plain models alike; a storage that several ops save counts once.
    """
    # Storages, not tensors: an op's saved output would keep the graph alive for ever.
    storages: dict[int, torch.UntypedStorage] = {}
    own = {data_part(p).untyped_storage()._cdata for p in model.parameters()}  # works for meta tensors too

    def keep(x: Tensor) -> Tensor:
        storage = data_part(x).untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return x.detach()

    scaling = scaling_of(model)
    if scaling is None or scaling.saved is None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(**batch)
    else:
        counting = replace(scaling, saved=_Counting(scaling.saved, keep))
        model.lpconv_scaling = counting  # type: ignore[assignment]  # not a module or tensor
        try:
            model(**batch)
        finally:
            model.lpconv_scaling = scaling  # type: ignore[assignment]
    return sum(storage.nbytes() for storage in storages.values())


class _Counting(SavedCodes):
    """`SavedCodes` that reports each saved tensor to `keep`."""

    def __init__(self, saved: SavedCodes, keep: Any) -> None:
        super().__init__(saved.format)
        self.keep = keep

    def pack(self, x: Tensor) -> Any:
        packed = super().pack(x)
        self.keep(packed if isinstance(packed, Tensor) else packed.coded.codes)
        return packed
