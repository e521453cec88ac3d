"""How an optimizer keeps a number: which tensors hold it, and how an fp32 result is put back into them.

An optimizer here computes in fp32 and differs from its rivals only in what survives the step. So a variant is a record:
one `Storage` for the weight and one for each moment.

    storage      tensors                  what is kept
    BF16         bf16                     the nearest bf16 number
    STOCHASTIC   bf16                     one of the two neighbours, unbiased (for weights)
    KAHAN        bf16 + bf16              the nearest, and the compensation of Kahan's sum (for weights)
    PAIR         bf16 + bf16              the nearest, and what it left: 16 bits or more (Collage)
    MASTER       bf16 + fp32              everything; the bf16 weight is a copy
    FP32         fp32                     everything
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

from lpconv.mcf.pairs import Rounding, join, split, stochastic_by_bits

__all__ = ["VARIANTS", "Parts", "Step", "Storage", "Variant", "load", "new_parts", "store", "total"]

Parts: TypeAlias = tuple[tuple[Tensor, ...], ...]  # of the weight, then of each moment
Step: TypeAlias = Callable[[Parts, Tensor, tuple[Tensor, ...], Tensor | None], None]  # gradient, coefficients, random


class Storage(Enum):
    """Dtypes of the tensor itself and of its companion, if it has one."""

    BF16 = "bf16"
    STOCHASTIC = "stochastic"
    KAHAN = "kahan"
    PAIR = "pair"
    MASTER = "master"
    FP32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self is Storage.FP32 else torch.bfloat16

    @property
    def companion(self) -> torch.dtype | None:
        return _COMPANIONS.get(self)

    @property
    def bytes_per_number(self) -> int:
        return self.dtype.itemsize + (self.companion.itemsize if self.companion else 0)


_COMPANIONS = {Storage.KAHAN: torch.bfloat16, Storage.PAIR: torch.bfloat16, Storage.MASTER: torch.float32}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Where the bits of the weight, the first and the second moment go."""

    name: str
    weight: Storage
    first: Storage
    second: Storage

    @property
    def moments(self) -> tuple[Storage, Storage]:
        return self.first, self.second

    def bytes_per_parameter(self, num_moments: int = 2, *, gradient: int = 2) -> int:
        """Weight, state and gradient; the gradient is bf16 unless its size is given."""
        state = sum(m.bytes_per_number for m in self.moments[:num_moments])
        return self.weight.bytes_per_number + state + gradient


def _variant(name: str, weight: Storage, first: Storage, second: Storage) -> Variant:
    return Variant(name=name, weight=weight, first=first, second=second)


# light and plus are those of Collage; full also keeps the first moment as a pair, whose rounding is what plus has left.
# The others are what they are measured against. Bytes per parameter with a bf16 gradient: 10 12 14, 8 8 10 12 16.
VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        _variant("light", Storage.PAIR, Storage.BF16, Storage.BF16),
        _variant("plus", Storage.PAIR, Storage.BF16, Storage.PAIR),
        _variant("full", Storage.PAIR, Storage.PAIR, Storage.PAIR),
        _variant("bf16", Storage.BF16, Storage.BF16, Storage.BF16),
        _variant("stochastic", Storage.STOCHASTIC, Storage.BF16, Storage.BF16),
        _variant("kahan", Storage.KAHAN, Storage.BF16, Storage.BF16),
        _variant("fp32-moments", Storage.BF16, Storage.FP32, Storage.FP32),
        _variant("fp32-master", Storage.MASTER, Storage.FP32, Storage.FP32),
    )
}


def new_parts(storage: Storage, tensor: Tensor) -> tuple[Tensor, ...]:
    """`tensor` with the companion that makes the parts stand for its value: zeros, or an fp32 copy."""
    if storage.companion is None:
        return (tensor,)
    if storage is Storage.MASTER:
        return tensor, tensor.to(torch.float32)
    return tensor, torch.zeros_like(tensor, dtype=storage.companion)


def load(storage: Storage, parts: tuple[Tensor, ...]) -> Tensor:
    """The fp32 value a rule starts from: everything kept, but for Kahan's compensation, which joins the next update."""
    if storage is Storage.PAIR:
        return join(*parts)
    if storage is Storage.MASTER:
        return parts[1]
    return parts[0].float()


def total(storage: Storage, parts: tuple[Tensor, ...]) -> Tensor:
    """Everything that is kept, as fp32."""
    return join(*parts) if storage is Storage.KAHAN else load(storage, parts)


def store(
    storage: Storage, parts: tuple[Tensor, ...], value: Tensor, nearest: Rounding, random: Tensor | None = None
) -> None:
    """Write the fp32 `value` into the parts. `random` (int32 below 2^16) is needed for STOCHASTIC only."""
    if storage is Storage.STOCHASTIC:
        assert random is not None
        parts[0].copy_(stochastic_by_bits(value, random))
    elif storage is Storage.KAHAN:
        _store_kahan(parts[0], parts[1], value, nearest)
    elif storage is Storage.PAIR:
        hi, lo = split(value, nearest)
        parts[0].copy_(hi)
        parts[1].copy_(lo)
    elif storage is Storage.MASTER:
        parts[0].copy_(value.to(torch.bfloat16))
        parts[1].copy_(value)
    else:
        parts[0].copy_(value.to(parts[0].dtype))


def _store_kahan(hi: Tensor, compensation: Tensor, value: Tensor, nearest: Rounding) -> None:
    """Kahan's sum as bf16 optimizers use it: the update joins the compensation, rounded, before it joins the weight."""
    old = hi.float()
    update = nearest(compensation.float() + (value - old)).float()
    new = nearest(old + update)
    compensation.copy_((update - (new.float() - old)).to(torch.bfloat16))
    hi.copy_(new)
