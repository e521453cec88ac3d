"""8-bit codes for the tensors that autograd saves for the backward pass.

Saved-tensor hooks see every tensor that an op saves during the forward pass. Scaled activations are cast to e4m3fn like
matmul operands, with one scale for the tensor; this loses nothing for tensors that a matmul casts to e4m3fn anyway.
Weights are saved by reference; per-row statistics and tensors saved by critical modules are unchanged.
Log-probabilities of 16-bit logits that a model computed in fp32 are stored in fp16, which is 8 times finer than the
bf16 logits. Under torch.compile the partitioner decides what is saved, and these hooks are not used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lpconv.kernels.operands import Coded, encode_operand
from lpconv.scaled.operands import operand_cast
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.scales import Scale
from lpconv.scaled.tensor import ScaledTensor


class _Packed(NamedTuple):
    """Codes of a dense tensor in memory order, and its layout."""

    coded: Coded
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    scale: Scale
    role: Role
    numerics: Numerics


class SavedCodes:
    """Saves the scaled activations of a model's forward pass as codes of `format`.

    A tensor that several ops save (the input of Q, K and V) is encoded once: codes are cached by storage while the
    forward pass runs and the storage exists. `note`, if set, is called with the codes, or with a tensor saved as it is.
    """

    def __init__(self, format: str) -> None:
        self.format, self.carrier = format, torch.float32
        self.note: Callable[[Tensor], object] | None = None
        self._codes: dict[tuple[int, int, int], tuple[StorageWeakRef, Coded]] = {}

    @contextmanager
    def during_forward(self, carrier: torch.dtype) -> Iterator[None]:
        """Save codes inside the context; activations are in `carrier` unless a model widens them."""
        self.carrier = carrier
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack_noted, self.unpack):
                yield
        finally:
            self._codes.clear()

    def _pack_noted(self, x: Tensor) -> Any:
        packed = self.pack(x)
        if self.note is not None:
            self.note(packed.coded.codes if isinstance(packed, _Packed) else packed)
        return packed

    def pack(self, x: Tensor) -> Any:
        """Encode a scaled activation, or exact fp32 next to a 16-bit carrier as fp16; other tensors are unchanged.

        Detached: an op that saves its own output would otherwise keep itself and its inputs alive if no backward pass
        follows.
        """
        if not isinstance(x, ScaledTensor) or not _worth_encoding(x.data_part):
            return x.detach()
        is_wider = x.role is Role.EXACT and x.dtype == torch.float32 and self.carrier != torch.float32
        if x.role is not Role.ACTIVATION and not is_wider:
            return x.detach()
        coded = self._encode(x.data_part, None if is_wider else self.format, x.numerics.operand_scales.grad_weight)
        return _Packed(coded, x.dtype, x.shape, x.stride(), x.scale, x.role, x.numerics)

    def unpack(self, packed: Any) -> Tensor:
        """Decode to the original dtype, shape and strides."""
        if not isinstance(packed, _Packed):
            return packed  # type: ignore[no-any-return]
        coded = packed.coded
        data = coded.decoded(packed.dtype) if coded.codes.itemsize == 1 else coded.codes.to(packed.dtype)
        data = data.as_strided(packed.size, packed.stride)
        return ScaledTensor(data, packed.scale, packed.role, packed.numerics)

    def _encode(self, data: Tensor, format: str | None, kind: str) -> Coded:
        """Codes of the storage that `data` fills, or its numbers in fp16, once per storage."""
        storage = data.untyped_storage()
        key = (storage._cdata, int(data.storage_offset()), data.numel())
        known = self._codes.get(key)
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            return known[1]
        flat = data.as_strided((data.numel(),), (1,), data.storage_offset())
        coded = Coded(flat.half(), 1.0) if format is None else encode_operand(flat, operand_cast(format, kind))
        self._codes[key] = (StorageWeakRef(storage), coded)  # type: ignore[no-untyped-call]
        return coded


def _worth_encoding(data: Tensor) -> bool:
    """Whether data are dense and wider than 8 bits, and more than one number per row (means and 1/σ stay exact)."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(data)
    return bool(is_dense) and data.dim() >= 2 and data.shape[-1] != 1 and data.itemsize > 1
