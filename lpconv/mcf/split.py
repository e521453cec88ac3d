"""One fp32 number as a 16-bit number that any tool reads and a residual that keeps what the rounding dropped.

Two families. The *float* residuals ("bf16", "fp16") are numbers: x ~ hi + lo, and an optimizer computes with them. The
*integer* residuals ("exact16", "int8") are bit patterns: the fp32 bits are those of hi followed by 16 zeros, plus the
residual taken as a signed integer. Rounding hi with ties away from zero, not to even, is what makes the 16-bit residual
fit int16: [-32768, 32767] instead of one value too many.

A caller that gives `out` and `scratch` allocates nothing per tensor; how is in `mcf.blocks`.

Inputs are fp32; bf16, fp16 and fp8 convert to fp32 exactly first (so the residual of a bf16 source is 0), and fp64 is
rounded to fp32 first. The bounds below are against that fp32 value.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lpconv.mcf.blocks import (
    FP16_RESIDUAL_SCALE,
    SCRATCH_ELEMENTS,
    merge_bf16_block,
    merge_exact16_block,
    merge_fp16_block,
    merge_int8_block,
    run_merge,
    run_split,
    split_bf16_block,
    split_exact16_block,
    split_fp16_block,
    split_int8_block,
)

__all__ = [
    "FP16_RESIDUAL_SCALE",
    "RESIDUALS",
    "SCRATCH_ELEMENTS",
    "Merge",
    "Residual",
    "Split",
    "merge_bf16",
    "merge_exact16",
    "merge_fp16",
    "merge_int8",
    "split_bf16",
    "split_exact16",
    "split_fp16",
    "split_int8",
]


class Split(Protocol):
    """`split(x) -> (hi, residual)`, both contiguous with the shape of `x`."""

    def __call__(
        self, x: Tensor, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class Merge(Protocol):
    """`merge(hi, residual) -> fp32`, contiguous with the shape of `hi`."""

    def __call__(
        self, hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A way to keep what rounding fp32 to `hi_dtype` dropped.

    For every |x| < overflow, |x - merge(split(x))| <= max(relative_bound · |x|, absolute_bound); from there on the
    merged number is infinite.
    """

    name: str
    split: Split
    merge: Merge
    hi_dtype: torch.dtype
    dtype: torch.dtype
    relative_bound: float
    absolute_bound: float
    overflow: float


def split_bf16(
    x: Tensor, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest bf16 `hi` and the bf16 `lo` nearest to the rest, renormalised so that bf16(hi + lo) == hi.

    |x - hi - lo| <= max(2^-17 |x|, 2^-134). `hi` is x rounded to nearest even, but for about 0.1 % of values: where lo
    rounds up to exactly half an ulp of an odd hi, the pair is rewritten as the even neighbour and minus half an ulp,
    which is the same sum. Splitting a merged pair therefore gives that pair back. Zero (with its sign), Inf and NaN are
    in hi with lo = 0, and so are the finite values from 0x1.feff8p127 on, whose hi is Inf.

    `out` is (bf16, bf16), contiguous, shape of `x`; `scratch` is fp32 with SCRATCH_ELEMENTS. Raises UsageError for
    other buffers and for inputs that are not floating-point.
    """
    return run_split(split_bf16_block, x, (torch.bfloat16, torch.bfloat16), out, scratch)


def merge_bf16(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """hi + lo in fp32, with the sign of hi: exact for every pair that `split_bf16` makes, -0 included.

    A pair from other arithmetic is rounded to fp32 once. It must be normalised (|lo| <= ulp(hi) / 2).
    """
    return run_merge(merge_bf16_block, hi, residual, (torch.bfloat16, torch.bfloat16), out, scratch)


def split_fp16(
    x: Tensor, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest fp16 `hi` and `lo` = fp16((x - hi) · 2^11), renormalised; x ~ hi + lo · 2^-11.

    |x - hi - lo · 2^-11| <= max(2^-23 |x|, 2^-36) for |x| < 0x1.ffdffep15 (65519.996), which is full relative precision
    from 2^-13 on; above it hi is Inf and lo = 0. Zero, Inf, NaN, `out` (fp16, fp16), `scratch` and errors as in
    `split_bf16`.
    """
    return run_split(split_fp16_block, x, (torch.float16, torch.float16), out, scratch)


def merge_fp16(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """hi + lo · 2^-11 in fp32, with the sign of hi; exact for every pair that `split_fp16` makes."""
    return run_merge(merge_fp16_block, hi, residual, (torch.float16, torch.float16), out, scratch)


def split_exact16(
    x: Tensor, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest bf16 `hi`, ties away from zero, and the int16 difference of the bit patterns: nothing is lost.

    bits(x) = (bits(hi) << 16) + residual for every finite value, both zeros and both infinities, so the merge is exact
    bit for bit. (From 0x1.ffp127 on hi is Inf and the residual negative: the merge is still exact.) A NaN becomes a
    quiet NaN in hi, with the residual holding its low 16 bits: a quiet NaN comes back bit for bit with its payload, a
    signalling one comes back with its quiet bit set and otherwise unchanged.

    `out` is (bf16, int16); `scratch` and errors as in `split_bf16`.
    """
    return run_split(split_exact16_block, x, (torch.bfloat16, torch.int16), out, scratch)


def merge_exact16(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The fp32 values that `split_exact16` took apart, bit for bit (see there for NaN)."""
    return run_merge(merge_exact16_block, hi, residual, (torch.bfloat16, torch.int16), out, scratch)


def split_int8(
    x: Tensor, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest bf16 `hi` and the rest in int8, in steps of 1/128 of half an ulp of hi.

    x is first rounded to 16 significant bits (the fp32 pattern without its low 8 bits) and that is split exactly, so
    |x - merge| <= max(2^-16 |x|, 2^-142) and the full range [-128, 127] is used. Scaling the rest to ±127 instead, as
    FlashOptim does (arXiv 2602.23349), keeps hi the plain rounding of x but misses 2^-16 by 1 %. Here hi is within
    0.502 ulp of x and differs from x rounded to even for about 0.2 % of values. From 0x1.ffffp127 on x becomes Inf. A
    NaN comes back as a quiet NaN with the top 15 bits of its payload field.

    `out` is (bf16, int8); `scratch` and errors as in `split_bf16`.
    """
    return run_split(split_int8_block, x, (torch.bfloat16, torch.int8), out, scratch)


def merge_int8(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The 16-bit value that `split_int8` kept, in fp32."""
    return run_merge(merge_int8_block, hi, residual, (torch.bfloat16, torch.int8), out, scratch)


RESIDUALS: dict[str, Residual] = {
    r.name: r
    for r in (
        Residual(name="bf16", split=split_bf16, merge=merge_bf16, hi_dtype=torch.bfloat16, dtype=torch.bfloat16,
                 relative_bound=2.0**-17, absolute_bound=2.0**-134,
                 overflow=float.fromhex("0x1.feff8p127")),
        Residual(name="exact16", split=split_exact16, merge=merge_exact16, hi_dtype=torch.bfloat16, dtype=torch.int16,
                 relative_bound=0.0, absolute_bound=0.0,
                 overflow=math.inf),
        Residual(name="int8", split=split_int8, merge=merge_int8, hi_dtype=torch.bfloat16, dtype=torch.int8,
                 relative_bound=2.0**-16, absolute_bound=2.0**-142,
                 overflow=float.fromhex("0x1.ffffp127")),
        Residual(name="fp16", split=split_fp16, merge=merge_fp16, hi_dtype=torch.float16, dtype=torch.float16,
                 relative_bound=2.0**-23, absolute_bound=2.0**-36,
                 overflow=float.fromhex("0x1.ffdffep15")),
    )
}  # fmt: skip
