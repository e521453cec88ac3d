"""What autograd saves for the backward pass, kept as 8-bit codes.

Saved-tensor hooks see every tensor that an op saves during the forward pass. Scaled activations are cast to e4m3fn as
matmul operands are, at one scale for the tensor; one that a matmul casts to e4m3fn anyway loses nothing by it. Weights
are saved by reference, per-row statistics and what critical modules save as they are. Log-probabilities of 16-bit
logits are kept in fp16 where a model computed them in fp32: fp16 holds them 8 times finer than bf16 held the logits.
Under torch.compile the partitioner decides what is saved, and these hooks stay out of its way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lpconv.scaled.operands import Coded, encode_operand
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.scales import Scale
from lpconv.scaled.tensor import ScaledTensor


class _Packed(NamedTuple):
    """Codes of a dense tensor in memory order, and how to lay them out again."""

    coded: Coded
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    scale: Scale
    role: Role
    numerics: Numerics


class SavedCodes:
    """Saves the scaled activations of a model's forward pass as codes of `format`.

    A tensor that several ops save (the input of Q, K and V) is encoded once: codes are remembered by storage for as
    long as the forward pass runs and the storage lives.
    """

    def __init__(self, format: str) -> None:
        self.format, self.carrier = format, torch.float32
        self._codes: dict[tuple[int, int, int], tuple[StorageWeakRef, Coded]] = {}

    @contextmanager
    def during_forward(self, carrier: torch.dtype) -> Iterator[None]:
        """Save codes while the block runs, in which activations are in `carrier` unless a model widens them."""
        self.carrier = carrier
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._codes.clear()

    def pack(self, x: Tensor) -> Any:
        """The codes of a scaled activation, fp16 for exact fp32 beside a 16-bit carrier; any other tensor as it is.

        Without its graph: an op that saves its own output would keep itself, and its inputs, where no backward follows.
        """
        if not isinstance(x, ScaledTensor) or not _worth_encoding(x.data_part):
            return x.detach()
        is_wider = x.role is Role.EXACT and x.dtype == torch.float32 and self.carrier != torch.float32
        if x.role is not Role.ACTIVATION and not is_wider:
            return x.detach()
        coded = self._encode(x.data_part, None if is_wider else self.format, x.numerics.operand_scales.grad_weight)
        return _Packed(coded, x.dtype, x.shape, x.stride(), x.scale, x.role, x.numerics)

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again, in its dtype, shape and strides."""
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
        coded = Coded(flat.half(), 1.0) if format is None else encode_operand(flat, format, kind)
        self._codes[key] = (StorageWeakRef(storage), coded)  # type: ignore[no-untyped-call]
        return coded


def _worth_encoding(data: Tensor) -> bool:
    """Dense and wider than 8 bits, and not one number per row (means, 1/σ), which is small and should stay exact."""
    if data.dim() < 2 or data.shape[-1] == 1 or data.itemsize == 1:
        return False
    strides = sorted((stride, size) for stride, size in zip(data.stride(), data.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return True
