"""One fp32 number as a 16-bit number that any tool reads and a residual that keeps what the rounding dropped.

Two families. The *float* residuals ("bf16", "fp16") are numbers: x ~ hi + lo, and an optimizer computes with them. The
*integer* residuals ("exact16", "int8") are bit patterns: the fp32 bits are those of hi followed by 16 zeros, plus the
residual taken as a signed integer. Rounding hi with ties away from zero, not to even, is what makes the 16-bit residual
fit int16: [-32768, 32767] instead of one value too many.

Everything here works elementwise in blocks that stay in the cache, so that the several passes of eager PyTorch cost
little more than one pass over memory, and a caller that gives `out` and `scratch` allocates nothing per tensor.

Inputs are fp32; bf16, fp16 and fp8 convert to fp32 exactly first (so the residual of a bf16 source is 0), and fp64 is
rounded to fp32 first. The bounds below are against that fp32 value.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from lpconv.errors import UsageError

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

# Half an fp16 ulp is 2^-11 of its number: the factor brings the residual back to the number's own size, where fp16 has
# its full 11 bits. Unscaled, the residual of a weight below 2^-3 is subnormal or 0 in fp16.
FP16_RESIDUAL_SCALE = 2.0**11

_BLOCK = 2**17  # below it the calls cost more than the work, above it the four buffers (2 MiB) leave the cache
SCRATCH_ELEMENTS = 4 * _BLOCK

Work: TypeAlias = tuple[Tensor, Tensor, Tensor]  # fp32, length of the block
BlockSplit: TypeAlias = Callable[[Tensor, Tensor, Tensor, Work], None]
BlockMerge: TypeAlias = Callable[[Tensor, Tensor, Tensor, Work], None]


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

    For every finite x whose hi is finite, |x - merge(split(x))| <= max(relative_bound · |x|, absolute_bound).
    """

    name: str
    split: Split
    merge: Merge
    hi_dtype: torch.dtype
    dtype: torch.dtype
    safetensors: str
    relative_bound: float
    absolute_bound: float


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
    return _run_split(_split_bf16_block, x, (torch.bfloat16, torch.bfloat16), out, scratch)


def merge_bf16(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """hi + lo in fp32, with the sign of hi: exact for every pair that `split_bf16` makes, -0 included.

    A pair from other arithmetic is rounded to fp32 once. It must be normalised (|lo| <= ulp(hi) / 2).
    """
    return _run_merge(_merge_bf16_block, hi, residual, (torch.bfloat16, torch.bfloat16), out, scratch)


def split_fp16(
    x: Tensor, *, out: tuple[Tensor, Tensor] | None = None, scratch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest fp16 `hi` and `lo` = fp16((x - hi) · 2^11), renormalised; x ~ hi + lo · 2^-11.

    |x - hi - lo · 2^-11| <= max(2^-23 |x|, 2^-36) for |x| < 0x1.ffdffep15 (65519.996), which is full relative precision
    from 2^-13 on; above it hi is Inf and lo = 0. Zero, Inf, NaN, `out` (fp16, fp16), `scratch` and errors as in
    `split_bf16`.
    """
    return _run_split(_split_fp16_block, x, (torch.float16, torch.float16), out, scratch)


def merge_fp16(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """hi + lo · 2^-11 in fp32, with the sign of hi; exact for every pair that `split_fp16` makes."""
    return _run_merge(_merge_fp16_block, hi, residual, (torch.float16, torch.float16), out, scratch)


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
    return _run_split(_split_exact16_block, x, (torch.bfloat16, torch.int16), out, scratch)


def merge_exact16(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The fp32 values that `split_exact16` took apart, bit for bit (see there for NaN)."""
    return _run_merge(_merge_exact16_block, hi, residual, (torch.bfloat16, torch.int16), out, scratch)


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
    return _run_split(_split_int8_block, x, (torch.bfloat16, torch.int8), out, scratch)


def merge_int8(hi: Tensor, residual: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """The 16-bit value that `split_int8` kept, in fp32."""
    return _run_merge(_merge_int8_block, hi, residual, (torch.bfloat16, torch.int8), out, scratch)


RESIDUALS: dict[str, Residual] = {
    r.name: r
    for r in (
        Residual(name="bf16", split=split_bf16, merge=merge_bf16, hi_dtype=torch.bfloat16, dtype=torch.bfloat16,
                 safetensors="BF16", relative_bound=2.0**-17, absolute_bound=2.0**-134),
        Residual(name="exact16", split=split_exact16, merge=merge_exact16, hi_dtype=torch.bfloat16, dtype=torch.int16,
                 safetensors="I16", relative_bound=0.0, absolute_bound=0.0),
        Residual(name="int8", split=split_int8, merge=merge_int8, hi_dtype=torch.bfloat16, dtype=torch.int8,
                 safetensors="I8", relative_bound=2.0**-16, absolute_bound=2.0**-142),
        Residual(name="fp16", split=split_fp16, merge=merge_fp16, hi_dtype=torch.float16, dtype=torch.float16,
                 safetensors="F16", relative_bound=2.0**-23, absolute_bound=2.0**-36),
    )
}  # fmt: skip


def _split_bf16_block(x: Tensor, hi: Tensor, lo: Tensor, work: Work) -> None:
    _split_float_block(x, hi, lo, work, 1.0)


def _split_fp16_block(x: Tensor, hi: Tensor, lo: Tensor, work: Work) -> None:
    _split_float_block(x, hi, lo, work, FP16_RESIDUAL_SCALE)


def _split_float_block(x: Tensor, hi: Tensor, lo: Tensor, work: Work, scale: float) -> None:
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
    lo.copy_(work.nan_to_num_(0.0, 0.0, 0.0).mul_(scale))  # Inf - Inf, and finite - Inf where hi overflowed


def _merge_bf16_block(hi: Tensor, lo: Tensor, out: Tensor, work: Work) -> None:
    _merge_float_block(hi, lo, out, work, 1.0)


def _merge_fp16_block(hi: Tensor, lo: Tensor, out: Tensor, work: Work) -> None:
    _merge_float_block(hi, lo, out, work, FP16_RESIDUAL_SCALE)


def _merge_float_block(hi: Tensor, lo: Tensor, out: Tensor, work: Work, scale: float) -> None:
    total, part, _ = work
    torch.add(total.copy_(hi), part.copy_(lo), alpha=1 / scale, out=part)
    torch.copysign(part, total, out=out)


def _split_exact16_block(x: Tensor, hi: Tensor, residual: Tensor, work: Work) -> None:
    bits, number, scratch = _bits_with_quiet_nans(x, work)
    residual.copy_(bits)  # the conversion keeps the low 16 bits
    _store_nearest_bf16(bits, number, scratch, hi)


def _split_int8_block(x: Tensor, hi: Tensor, residual: Tensor, work: Work) -> None:
    bits, number, scratch = _bits_with_quiet_nans(x, work)
    bits.add_(torch.bitwise_and(number, 0x80, out=scratch))
    residual.copy_(torch.bitwise_right_shift(bits, 8, out=scratch))  # the conversion keeps bits 8 to 15
    _store_nearest_bf16(bits, number, scratch, hi)


def _bits_with_quiet_nans(x: Tensor, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """(bits of x, all ones where x is not NaN, free buffer). Masks by arithmetic: on the CPU comparing costs more."""
    bits, number, scratch = (w.view(torch.int32) for w in work)
    bits.copy_(x.view(torch.int32))
    torch.bitwise_and(bits, 0x7FFFFFFF, out=number)
    number.sub_(0x7F800001).bitwise_right_shift_(31)
    torch.bitwise_not(number, out=scratch)
    bits.bitwise_or_(scratch.bitwise_and_(0x00400000))
    return bits, number, scratch


def _store_nearest_bf16(bits: Tensor, number: Tensor, scratch: Tensor, hi: Tensor) -> None:
    """The upper half of `bits` (overwritten), rounded to nearest, ties away from zero; NaNs are cut, not rounded."""
    bits.add_(torch.bitwise_and(number, 0x8000, out=scratch))
    hi.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def _merge_exact16_block(hi: Tensor, residual: Tensor, out: Tensor, work: Work) -> None:
    low = work[1].view(torch.int32)
    _join_bits(hi, low.copy_(residual), out, work)


def _merge_int8_block(hi: Tensor, residual: Tensor, out: Tensor, work: Work) -> None:
    low = work[1].view(torch.int32)
    _join_bits(hi, low.copy_(residual).bitwise_left_shift_(8), out, work)


def _join_bits(hi: Tensor, low: Tensor, out: Tensor, work: Work) -> None:
    """(bits(hi) << 16) + low, and (bits(hi) << 16) | (low & 0xFFFF) where hi is NaN."""
    upper, _, borrow = (w.view(torch.int32) for w in work)
    upper.copy_(hi.view(torch.int16))
    torch.bitwise_and(upper, 0x7FFF, out=borrow)
    borrow.sub_(0x7F81).bitwise_and_(low).bitwise_right_shift_(31)  # -1 where hi is not NaN and low < 0
    upper.add_(borrow).bitwise_left_shift_(16)
    torch.bitwise_or(upper, low.bitwise_and_(0xFFFF), out=out.view(torch.int32))


def _run_split(
    block: BlockSplit,
    x: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    out: tuple[Tensor, Tensor] | None,
    scratch: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if not x.is_floating_point():
        raise UsageError(f"cannot split a tensor of {x.dtype}", hint="only floating-point tensors have a residual")
    hi, residual = out or tuple(torch.empty(x.shape, dtype=d, device=x.device) for d in dtypes)
    _check_buffer("out[0]", hi, x.shape, dtypes[0])
    _check_buffer("out[1]", residual, x.shape, dtypes[1])
    flat, flat_hi, flat_residual = x.reshape(-1), hi.view(-1), residual.view(-1)
    for part, source, work in _blocks(x.numel(), scratch, x.device):
        x_block = flat[part]
        if x.dtype != torch.float32:
            x_block = source.copy_(x_block)
        block(x_block, flat_hi[part], flat_residual[part], work)
    return hi, residual


def _run_merge(
    block: BlockMerge,
    hi: Tensor,
    residual: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    out: Tensor | None,
    scratch: Tensor | None,
) -> Tensor:
    if (hi.dtype, residual.dtype) != dtypes or hi.shape != residual.shape:
        found = f"{hi.dtype} {tuple(hi.shape)} and {residual.dtype} {tuple(residual.shape)}"
        raise UsageError(f"cannot merge {found}", hint=f"expected {dtypes[0]} and {dtypes[1]} of one shape")
    if out is None:
        out = torch.empty(hi.shape, dtype=torch.float32, device=hi.device)
    _check_buffer("out", out, hi.shape, torch.float32)
    flat_hi, flat_residual, flat_out = hi.reshape(-1), residual.reshape(-1), out.view(-1)
    for part, _, work in _blocks(hi.numel(), scratch, hi.device):
        block(flat_hi[part], flat_residual[part], flat_out[part], work)
    return out


def _blocks(numel: int, scratch: Tensor | None, device: torch.device) -> Iterator[tuple[slice, Tensor, Work]]:
    """For each block of a flat tensor: its slice and four fp32 buffers, one for the input and three to work in."""
    if scratch is None:
        scratch = torch.empty(4 * min(numel, _BLOCK), dtype=torch.float32, device=device)
    elif scratch.dtype != torch.float32 or not scratch.is_contiguous() or scratch.numel() < SCRATCH_ELEMENTS:
        raise UsageError("unfit scratch buffer", hint=f"contiguous fp32 with {SCRATCH_ELEMENTS} elements or more")
    for start in range(0, numel, _BLOCK):
        length = min(_BLOCK, numel - start)
        source, *work = scratch.view(-1)[: 4 * length].view(4, length)
        yield slice(start, start + length), source, (work[0], work[1], work[2])


def _check_buffer(name: str, buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if buffer.shape != shape or buffer.dtype != dtype or not buffer.is_contiguous():
        found = f"{buffer.dtype} {tuple(buffer.shape)}"
        raise UsageError(f"unfit buffer `{name}`: {found}", hint=f"contiguous {dtype} {tuple(shape)} is needed")
