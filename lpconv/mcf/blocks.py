"""Block-wise implementation of `mcf.split`.

Splitting and merging take several elementwise passes. Over blocks that stay in the cache they cost little more than one
pass over memory, and they use buffers that the caller can reuse. A block function receives one flat block of the input,
one of each output, and three fp32 buffers of the same length.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from lpconv.errors import UsageError

_BLOCK = 2**17  # fewer elements: call overhead dominates; more: the four buffers (2 MiB) no longer fit the cache
SCRATCH_ELEMENTS = 4 * _BLOCK

Work: TypeAlias = tuple[Tensor, Tensor, Tensor]  # fp32, length of the block
BlockSplit: TypeAlias = Callable[[Tensor, Tensor, Tensor, Work], None]
BlockMerge: TypeAlias = Callable[[Tensor, Tensor, Tensor, Work], None]


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
