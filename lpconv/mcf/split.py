"""Split fp32 into a 16-bit number that any tool reads and a residual with the bits that rounding dropped.

There are two families. The *float* residuals ("bf16", "fp16") are numbers: x ~ hi + lo, and an optimizer computes with
them. The *integer* residuals ("exact16", "int8") are bit patterns: the fp32 bits are those of hi followed by 16 zeros,
plus the residual as a signed integer. hi is rounded with ties away from zero, not to even, so that the 16-bit residual
fits int16: [-32768, 32767] instead of one value too many.

With `out` and `scratch` given, nothing is allocated per tensor; see `mcf.blocks`.

Inputs are fp32; bf16, fp16 and fp8 convert to fp32 exactly first (so the residual of a bf16 source is 0), and fp64 is
rounded to fp32 first. The bounds below are relative to that fp32 value.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.mcf.blocks import (
    BlockMerge,
    BlockSplit,
    blocks,
    merge_exact16_block,
    merge_float_block,
    merge_int8_block,
    split_exact16_block,
    split_float_block,
    split_int8_block,
)

# Half an fp16 ulp is 2^-11 of its number: this factor brings the residual to the size of the number, where fp16 has its
# full 11 bits. Without it, the residual of a weight below 2^-3 is subnormal or 0 in fp16.
FP16_RESIDUAL_SCALE = 2.0**11


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
