"""Split fp32 into a 16-bit number that any tool reads and a residual with the bits that rounding dropped.

There are two families. The *float* residuals ("bf16", "fp16") are numbers: x ~ hi + lo, and an optimizer computes with
them. The *integer* residuals ("exact16", "int8") are bit patterns: the fp32 bits are those of hi followed by 16 zeros,
plus the residual as a signed integer. hi is rounded with ties away from zero, not to even, so that the 16-bit residual
fits int16: [-32768, 32767] instead of one value too many.

Splitting and merging take several elementwise passes. Over blocks that stay in the cache they cost little more than one
pass over memory, and they use buffers that the caller can reuse: with `out` and `scratch` given, nothing is allocated
per tensor. A block function receives one flat block of the input, one of each output, and three fp32 buffers of the
same length.

Inputs are fp32; bf16, fp16 and fp8 convert to fp32 exactly first (so the residual of a bf16 source is 0), and fp64 is
rounded to fp32 first. The bounds below are relative to that fp32 value.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lpconv.errors import UsageError

_BLOCK = 2**17  # fewer elements: call overhead dominates; more: the four buffers (2 MiB) no longer fit the cache
SCRATCH_ELEMENTS = 4 * _BLOCK

Work: TypeAlias = tuple[Tensor, Tensor, Tensor]  # fp32, length of the block
BlockSplit: TypeAlias = Callable[[Tensor, Tensor, Tensor, Work], None]
BlockMerge: TypeAlias = Callable[[Tensor, Tensor, Tensor, Work], None]
# Half an fp16 ulp is 2^-11 of its number: this factor brings the residual to the size of the number, where fp16 has its
# full 11 bits. Without it, the residual of a weight below 2^-3 is subnormal or 0 in fp16.
FP16_RESIDUAL_SCALE = 2.0**11


def split_float_block(x: Tensor, hi: Tensor, lo: Tensor, work: Work, scale: float) -> None:
    total, part, _ = work
    total.copy_(hi.copy_(x))
    _store_rest(x, total, lo, part, scale)
    # Renormalise. The sum is exact in fp32, because lo is a multiple of ulp(x).
    total.add_(part.copy_(lo), alpha=1 / scale)
    torch.copysign(total, x, out=total)  # -0 + 0 is +0
    part.copy_(hi.copy_(total))
    _store_rest(total, part, lo, part, scale)


def _store_rest(x: Tensor, hi: Tensor, lo: Tensor, work: Tensor, scale: float) -> None:
    torch.sub(x, hi, out=work)
    lo.copy_(work.nan_to_num_(0.0, 0.0, 0.0).mul_(scale))  # Inf - Inf, and finite - Inf if hi overflowed


def merge_float_block(hi: Tensor, lo: Tensor, out: Tensor, work: Work, scale: float) -> None:
    total, part, _ = work
    torch.add(total.copy_(hi), part.copy_(lo), alpha=1 / scale, out=part)
    torch.copysign(part, total, out=out)


def split_exact16_block(x: Tensor, hi: Tensor, residual: Tensor, work: Work) -> None:
    bits, number, scratch = _bits_with_quiet_nans(x, work)
    residual.copy_(bits)  # the conversion keeps the low 16 bits
    _store_nearest_bf16(bits, number, scratch, hi)


def split_int8_block(x: Tensor, hi: Tensor, residual: Tensor, work: Work) -> None:
    bits, number, scratch = _bits_with_quiet_nans(x, work)
    bits.add_(torch.bitwise_and(number, 0x80, out=scratch))
    residual.copy_(torch.bitwise_right_shift(bits, 8, out=scratch))  # the conversion keeps bits 8 to 15
    _store_nearest_bf16(bits, number, scratch, hi)


def _bits_with_quiet_nans(x: Tensor, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """Return (bits of x with quiet NaNs, all ones where x is not NaN, a free buffer).

    Masks come from arithmetic, since comparisons cost more on the CPU.
    """
    bits, number, scratch = (w.view(torch.int32) for w in work)
    bits.copy_(x.view(torch.int32))
    torch.bitwise_and(bits, 0x7FFFFFFF, out=number)
    number.sub_(0x7F800001).bitwise_right_shift_(31)
    torch.bitwise_not(number, out=scratch)
    bits.bitwise_or_(scratch.bitwise_and_(0x00400000))
    return bits, number, scratch


def _store_nearest_bf16(bits: Tensor, number: Tensor, scratch: Tensor, hi: Tensor) -> None:
    """Store the upper half of `bits` (overwritten) in `hi`, to nearest with ties away from zero; NaNs are truncated."""
    bits.add_(torch.bitwise_and(number, 0x8000, out=scratch))
    hi.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def merge_exact16_block(hi: Tensor, residual: Tensor, out: Tensor, work: Work) -> None:
    low = work[1].view(torch.int32)
    _join_bits(hi, low.copy_(residual), out, work)


def merge_int8_block(hi: Tensor, residual: Tensor, out: Tensor, work: Work) -> None:
    low = work[1].view(torch.int32)
    _join_bits(hi, low.copy_(residual).bitwise_left_shift_(8), out, work)


def _join_bits(hi: Tensor, low: Tensor, out: Tensor, work: Work) -> None:
    """Write (bits(hi) << 16) + low to `out`, or (bits(hi) << 16) | (low & 0xFFFF) where hi is NaN."""
    upper, _, borrow = (w.view(torch.int32) for w in work)
    upper.copy_(hi.view(torch.int16))
    torch.bitwise_and(upper, 0x7FFF, out=borrow)
    borrow.sub_(0x7F81).bitwise_and_(low).bitwise_right_shift_(31)  # -1 where hi is not NaN and low < 0
    upper.add_(borrow).bitwise_left_shift_(16)
    torch.bitwise_or(upper, low.bitwise_and_(0xFFFF), out=out.view(torch.int32))


def blocks(numel: int, scratch: Tensor | None, device: torch.device) -> Iterator[tuple[slice, Tensor, Work]]:
    """Yield the slice of each block of a flat tensor and four fp32 buffers: one for the input and three for work."""
    if scratch is None:
        scratch = torch.empty(4 * min(numel, _BLOCK), dtype=torch.float32, device=device)
    elif scratch.dtype != torch.float32 or not scratch.is_contiguous() or scratch.numel() < SCRATCH_ELEMENTS:
        raise UsageError(
            "the scratch buffer has the wrong size or dtype",
            hint=f"pass a contiguous fp32 tensor with at least {SCRATCH_ELEMENTS} elements",
        )
    for start in range(0, numel, _BLOCK):
        length = min(_BLOCK, numel - start)
        source, *work = scratch.view(-1)[: 4 * length].view(4, length)
        yield slice(start, start + length), source, (work[0], work[1], work[2])


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A format for the part of fp32 that rounding to `hi_dtype` drops.

    For every |x| < overflow, |x - merge(split(x))| <= max(relative_bound · |x|, absolute_bound); above that the merged
    number is infinite.
    """

    name: str
    hi_dtype: torch.dtype
    dtype: torch.dtype
    split_block: BlockSplit
    merge_block: BlockMerge
    relative_bound: float
    absolute_bound: float
    overflow: float

    def split(
        self, x: Tensor, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (hi, residual), both contiguous with the shape of `x`: `out`, or new tensors.

        `scratch` is fp32 with SCRATCH_ELEMENTS. Raises UsageError for other buffers and for inputs that are not
        floating-point.
        """
        if not x.is_floating_point():
            raise UsageError(f"cannot split a tensor of {x.dtype}", hint="only floating-point tensors can be split")
        dtypes = (self.hi_dtype, self.dtype)
        hi, residual = out or tuple(torch.empty(x.shape, dtype=d, device=x.device) for d in dtypes)
        _check_buffer("out[0]", hi, x.shape, self.hi_dtype)
        _check_buffer("out[1]", residual, x.shape, self.dtype)
        flat, flat_hi, flat_residual = x.reshape(-1), hi.view(-1), residual.view(-1)
        for part, source, work in blocks(x.numel(), scratch, x.device):
            x_block = flat[part]
            if x.dtype != torch.float32:
                x_block = source.copy_(x_block)
            self.split_block(x_block, flat_hi[part], flat_residual[part], work)
        return hi, residual

    def merge(
        self, hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """Return the fp32 numbers before the split, contiguous with the shape of `hi`: `out`, or a new tensor.

        `scratch` and errors as in `split`.
        """
        if (hi.dtype, residual.dtype) != (self.hi_dtype, self.dtype) or hi.shape != residual.shape:
            description = f"{hi.dtype} {tuple(hi.shape)} and {residual.dtype} {tuple(residual.shape)}"
            raise UsageError(
                f"cannot merge {description}", hint=f"expected {self.hi_dtype} and {self.dtype} of one shape"
            )
        if out is None:
            out = torch.empty(hi.shape, dtype=torch.float32, device=hi.device)
        _check_buffer("out", out, hi.shape, torch.float32)
        flat_hi, flat_residual, flat_out = hi.reshape(-1), residual.reshape(-1), out.view(-1)
        for part, _, work in blocks(hi.numel(), scratch, hi.device):
            self.merge_block(flat_hi[part], flat_residual[part], flat_out[part], work)
        return out


def _check_buffer(name: str, buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if buffer.shape != shape or buffer.dtype != dtype or not buffer.is_contiguous():
        description = f"{buffer.dtype} {tuple(buffer.shape)}"
        raise UsageError(
            f"buffer `{name}` does not fit: {description}",
            hint=f"pass a contiguous {dtype} tensor of shape {tuple(shape)}",
        )


# The nearest bf16 `hi` and the bf16 `lo` nearest to the rest, renormalised so that bf16(hi + lo) == hi. `hi` is x
# rounded to nearest even, except for about 0.1 % of values: if lo rounds up to exactly half an ulp of an odd hi, the
# pair is rewritten as the even neighbour and minus half an ulp, which is the same sum. Splitting a merged pair
# therefore returns that pair. Zero (with its sign), Inf and NaN are in hi with lo = 0, and so are finite values
# whose hi is Inf. The merge is hi + lo with the sign of hi: exact for every pair from the split, including -0. Pairs
# from other arithmetic must be normalised (|lo| <= ulp(hi) / 2); their sum is rounded to fp32 once.
BF16 = Residual(
    name="bf16",
    hi_dtype=torch.bfloat16,
    dtype=torch.bfloat16,
    split_block=partial(split_float_block, scale=1.0),
    merge_block=partial(merge_float_block, scale=1.0),
    relative_bound=2.0**-17,
    absolute_bound=2.0**-134,
    overflow=float.fromhex("0x1.feff8p127"),
)

# The nearest fp16 `hi` and `lo` = fp16((x - hi) · 2^11), renormalised; x ~ hi + lo · 2^-11. Full relative precision
# from 2^-13 on. Zero, Inf, NaN, the sign and exactness as in BF16.
FP16 = Residual(
    name="fp16",
    hi_dtype=torch.float16,
    dtype=torch.float16,
    split_block=partial(split_float_block, scale=FP16_RESIDUAL_SCALE),
    merge_block=partial(merge_float_block, scale=FP16_RESIDUAL_SCALE),
    relative_bound=2.0**-23,
    absolute_bound=2.0**-36,
    overflow=float.fromhex("0x1.ffdffep15"),  # 65519.996
)

# The nearest bf16 `hi`, ties away from zero, and the int16 difference of the bit patterns: nothing is lost.
# bits(x) = (bits(hi) << 16) + residual for every finite value, both zeros and both infinities, so the merge is exact
# bit for bit. (From 0x1.ffp127 on hi is Inf and the residual negative: the merge is still exact.) A NaN becomes a quiet
# NaN in hi, with its low 16 bits in the residual: a quiet NaN is restored bit for bit with its payload, a signalling
# NaN with its quiet bit set and otherwise unchanged.
EXACT16 = Residual(
    name="exact16",
    hi_dtype=torch.bfloat16,
    dtype=torch.int16,
    split_block=split_exact16_block,
    merge_block=merge_exact16_block,
    relative_bound=0.0,
    absolute_bound=0.0,
    overflow=math.inf,
)

# The nearest bf16 `hi` and the rest in int8, in steps of 1/128 of half an ulp of hi. x is first rounded to 16
# significant bits (the fp32 pattern without its low 8 bits), then split exactly, so that the full range
# [-128, 127] is used. Scaling the rest to ±127 instead, as FlashOptim does (arXiv 2602.23349), keeps hi the plain
# rounding of x but misses 2^-16 by 1 %. Here hi is within 0.502 ulp of x and differs from x rounded to even for about
# 0.2 % of values. A NaN is restored as a quiet NaN with the top 15 bits of its payload field.
INT8 = Residual(
    name="int8",
    hi_dtype=torch.bfloat16,
    dtype=torch.int8,
    split_block=split_int8_block,
    merge_block=merge_int8_block,
    relative_bound=2.0**-16,
    absolute_bound=2.0**-142,
    overflow=float.fromhex("0x1.ffffp127"),
)

RESIDUALS: dict[str, Residual] = {r.name: r for r in (BF16, EXACT16, INT8, FP16)}
