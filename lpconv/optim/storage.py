"""Storage of an optimizer's numbers: the tensors of each, and the conversion from and to fp32.

Optimizers here compute in fp32 and differ only in what they store between steps. So a variant is a record with one
`Storage` for the weight and one for each moment.

    storage      tensors                  what is stored
    BF16         bf16                     the nearest bf16 number
    STOCHASTIC   bf16                     one of the two neighbours, unbiased (for weights)
    KAHAN        bf16 + bf16              the nearest, and the compensation of Kahan's sum (for weights)
    PAIR         bf16 + bf16              the nearest, and its rounding error: 16 bits or more (Collage)
    MASTER       bf16 + fp32              everything; the bf16 weight is a copy
    FP32         fp32                     everything
    INT8         bf16 + int8              the nearest, and its rounding error in steps of |hi| / 32512: 16 bits
    DITHERED     bf16                     the nearest to the number plus an offset, the step's part of an ulp
    RATIO        int8                     a number within [-1, 1] as its square root, with the same offset

and for weights on unit scale, whose first byte the matmul reads without a cast:

    FP8          e4m3fn                   the nearest e4m3fn number
    FP8_BF16     e4m3fn + bf16            the nearest, and its rounding error: 13 bits or more
    FP8_FP8      e4m3fn + e4m3fn          the same in 2 bytes: 9 bits or more
    FP8_MASTER   e4m3fn + fp32            everything
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

from lpconv.mcf.pairs import (
    Rounding,
    join,
    join_e4m3fn,
    join_int8,
    nearest_e4m3fn,
    nearest_with_offset,
    split,
    split_e4m3fn,
    split_int8,
    stochastic_by_bits,
)

Parts: TypeAlias = tuple[tuple[Tensor, ...], ...]  # tensors of the weight, then of each moment
Step: TypeAlias = Callable[[Parts, Tensor, tuple[Tensor, ...], Tensor | None], None]  # gradient, coefficients, random


class Storage(Enum):
    """Dtypes of a tensor and its companion, if any, and the relative error of normal numbers."""

    BF16 = ("bf16", torch.bfloat16, None, 2.0**-8)
    STOCHASTIC = ("stochastic", torch.bfloat16, None, 2.0**-7)
    KAHAN = ("kahan", torch.bfloat16, torch.bfloat16, 2.0**-16)
    PAIR = ("pair", torch.bfloat16, torch.bfloat16, 2.0**-17)
    MASTER = ("master", torch.bfloat16, torch.float32, 2.0**-24)
    FP32 = ("fp32", torch.float32, None, 2.0**-24)
    INT8 = ("int8", torch.bfloat16, torch.int8, 1.02 * 2.0**-16)
    DITHERED = ("dithered", torch.bfloat16, None, 2.0**-7)
    RATIO = ("ratio", torch.int8, None, 2.0**-6)  # of 1: smaller numbers have smaller steps
    FP8 = ("fp8", torch.float8_e4m3fn, None, 2.0**-4)
    FP8_BF16 = ("fp8-bf16", torch.float8_e4m3fn, torch.bfloat16, 2.0**-13)
    FP8_FP8 = ("fp8-fp8", torch.float8_e4m3fn, torch.float8_e4m3fn, 2.0**-9)
    FP8_MASTER = ("fp8-master", torch.float8_e4m3fn, torch.float32, 2.0**-24)

    def __init__(self, label: str, dtype: torch.dtype, companion: torch.dtype | None, relative_error: float) -> None:
        self.label = label
        self.dtype = dtype
        self.companion = companion
        self.relative_error = relative_error

    @property
    def bytes_per_number(self) -> int:
        return self.dtype.itemsize + (self.companion.itemsize if self.companion else 0)


_MASTERS = (Storage.MASTER, Storage.FP8_MASTER)
WITH_OFFSET = (Storage.DITHERED, Storage.RATIO)
_RATIO_STEPS = 127
_FP8_PAIRS = (Storage.FP8_BF16, Storage.FP8_FP8)


@dataclass(frozen=True)
class Variant:
    """Storage of the weight and of both moments; `rule` replaces AdamW's rule by one made for what is stored."""

    name: str
    weight: Storage
    first: Storage
    second: Storage
    rule: str | None = None

    @property
    def moments(self) -> tuple[Storage, Storage]:
        return self.first, self.second

    def bytes_per_parameter(self, *, gradient: int = 2) -> int:
        """Bytes of weight, state and gradient per parameter; `gradient` is its size in bytes, by default bf16."""
        return sum(s.bytes_per_number for s in (self.weight, *self.moments)) + gradient


# light and plus are Collage's; full also stores the first moment as a pair, the only rounding left in plus. The others
# are for comparison, but for the last three: the fewest bytes that train like fp32. Bytes per parameter with a bf16
# gradient: 10 12 14, 8 8 10 12 16, 9 8 8.
VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant("light", Storage.PAIR, Storage.BF16, Storage.BF16),
        Variant("plus", Storage.PAIR, Storage.BF16, Storage.PAIR),
        Variant("full", Storage.PAIR, Storage.PAIR, Storage.PAIR),
        Variant("bf16", Storage.BF16, Storage.BF16, Storage.BF16),
        Variant("stochastic", Storage.STOCHASTIC, Storage.BF16, Storage.BF16),
        Variant("kahan", Storage.KAHAN, Storage.BF16, Storage.BF16),
        Variant("fp32-moments", Storage.BF16, Storage.FP32, Storage.FP32),
        Variant("fp32-master", Storage.MASTER, Storage.FP32, Storage.FP32),
        Variant("light-int8", Storage.INT8, Storage.BF16, Storage.DITHERED),
        Variant("int8-moment", Storage.INT8, Storage.RATIO, Storage.DITHERED, rule="adamw-ratio"),
        Variant("eco", Storage.BF16, Storage.BF16, Storage.DITHERED, rule="adamw-eco"),
    )
}


def new_parts(storage: Storage, tensor: Tensor) -> tuple[Tensor, ...]:
    """`tensor` and its initial companion: zeros, or an fp32 copy."""
    if storage.companion is None:
        return (tensor,)
    if storage in _MASTERS:
        return tensor, tensor.to(torch.float32)
    return tensor, torch.zeros_like(tensor, dtype=storage.companion)


def load(storage: Storage, parts: tuple[Tensor, ...]) -> Tensor:
    """The fp32 value that a rule starts from. Kahan's compensation is not in it, but added to the next update."""
    if storage is Storage.PAIR:
        return join(*parts)
    if storage in _FP8_PAIRS:
        return join_e4m3fn(*parts)
    if storage is Storage.INT8:
        return join_int8(*parts)
    if storage is Storage.RATIO:
        root = parts[0].float() / _RATIO_STEPS
        return root * root.abs()
    if storage in _MASTERS:
        return parts[1]
    return parts[0].float()


def stored_value(storage: Storage, parts: tuple[Tensor, ...]) -> Tensor:
    return join(*parts) if storage is Storage.KAHAN else load(storage, parts)


def store(
    storage: Storage, parts: tuple[Tensor, ...], value: Tensor, nearest: Rounding, random: Tensor | None = None
) -> None:
    """Write the fp32 `value` into the parts.

    STOCHASTIC needs `random`, int32 below 2^16 for each element; DITHERED and RATIO one number of [-1/2, 1/2) for all.
    """
    if storage is Storage.STOCHASTIC:
        assert random is not None
        parts[0].copy_(stochastic_by_bits(value, random))
    elif storage is Storage.KAHAN:
        _store_kahan(parts[0], parts[1], value, nearest)
    elif storage in (Storage.PAIR, Storage.INT8):
        hi, lo = split(value, nearest) if storage is Storage.PAIR else split_int8(value, nearest)
        parts[0].copy_(hi)
        parts[1].copy_(lo)
    elif storage is Storage.DITHERED:
        assert random is not None
        parts[0].copy_(nearest_with_offset(value, random, nearest))
    elif storage is Storage.RATIO:
        assert random is not None
        code = torch.copysign(value.abs().sqrt() * _RATIO_STEPS, value) + random
        parts[0].copy_(code.round().clamp(-_RATIO_STEPS, _RATIO_STEPS).to(torch.int8))
    elif storage in _FP8_PAIRS:
        hi, lo = split_e4m3fn(value, parts[1].dtype)
        parts[0].copy_(hi)
        parts[1].copy_(lo)
    elif storage in _MASTERS:
        parts[0].copy_(_cast(value, parts[0].dtype))
        parts[1].copy_(value)
    else:
        parts[0].copy_(_cast(value, parts[0].dtype))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return (nearest_e4m3fn(value) if dtype == torch.float8_e4m3fn else value).to(dtype)


def _store_kahan(hi: Tensor, compensation: Tensor, value: Tensor, nearest: Rounding) -> None:
    """Kahan summation as in bf16 optimizers: round compensation + update, then add it to the weight."""
    old = hi.float()
    update = nearest(compensation.float() + (value - old)).float()
    new = nearest(old + update)
    compensation.copy_((update - (new.float() - old)).to(torch.bfloat16))
    hi.copy_(new)
