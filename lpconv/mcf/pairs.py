"""fp32 in registers, pairs in memory: the arithmetic of compiled kernels.

A kernel joins a pair to fp32, computes, and splits the result again. The split converts the rounded `hi` back to fp32,
and a compiler that keeps 16-bit intermediates in fp32 would make `lo` 0. Two roundings avoid that, with the same
result:

- `nearest_by_bits` rounds by integer arithmetic on the bit pattern, which no compiler can simplify;
- `nearest_by_cast` is a plain conversion, only for compilation with `expansion.EXACT_OPTIONS`. On the CPU it makes a
  kernel three times as fast, because inductor moves every bit pattern between float and integer through memory.

Plain functions of tensors; both are correct in eager mode.

In fp8 pairs, an e4m3fn rest is stored multiplied by 2^4: without that it would be 0 for ordinary weights. PyTorch has
no fp8 arithmetic, so both parts are for storage only.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS

Rounding: TypeAlias = Callable[[Tensor], Tensor]  # fp32 -> bf16

INT8_STEPS = 127 * 2**8  # of an int8 code, in one hi
_E4M3FN = FORMATS["e4m3fn"]
_STEP = 2.0**4  # factor of an e4m3fn rest


def nearest_by_bits(x: Tensor) -> Tensor:
    """Round fp32 `x` to the nearest bf16 number, ties to even. Overflow gives Inf; NaN stays NaN."""
    bits = x.view(torch.int32)
    return _cut(x, bits + (0x7FFF + ((bits >> 16) & 1)))


def nearest_by_cast(x: Tensor) -> Tensor:
    """Round like `nearest_by_bits`, by conversion."""
    return x.to(torch.bfloat16)


def stochastic_by_bits(x: Tensor, random: Tensor) -> Tensor:
    """Round fp32 `x` to one of its two bf16 neighbours, the upper with probability (distance to the lower) / ulp.

    `random` is int32, uniform on [0, 2^16), shape of `x`. bf16 numbers, Inf and NaN are unchanged.
    """
    return _cut(x, x.view(torch.int32) + random)


def split(x: Tensor, nearest: Rounding = nearest_by_bits) -> tuple[Tensor, Tensor]:
    """Split fp32 `x` into bf16 (hi, lo) with |x - hi - lo| <= max(2^-17 |x|, 2^-134) if hi is finite.

    Unlike `mcf.split.BF16.split`, lo may be exactly half an ulp (the sum is the same), and lo is not finite if hi is
    Inf or NaN: the extra checks would not pay in a kernel.
    """
    hi = nearest(x)
    return hi, (x - hi.float()).to(torch.bfloat16)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return hi + lo in fp32: exact for every pair from `split`."""
    return hi.float() + lo.float()


def split_int8(x: Tensor, nearest: Rounding = nearest_by_bits) -> tuple[Tensor, Tensor]:
    """Split fp32 `x` into bf16 hi and an int8 code of the rest, in steps of hi / 32512 (after arXiv 2602.23349).

    The rest is at most half an ulp, 2^-8 |hi| = 127 steps. So |x - join_int8| <= 1.02 · 2^-16 |x| for normal numbers; a
    hi of 0 has the code 0. FlashOptim's steps are fractions of the ulp, up to half as long, and need its exponent.
    """
    hi = nearest(x)
    wide = hi.float()
    code = (x - wide) * INT8_STEPS / torch.where(wide == 0, 1.0, wide)
    return hi, code.round().clamp(-127, 127).to(torch.int8)


def join_int8(hi: Tensor, code: Tensor) -> Tensor:
    """Return hi · (1 + code / 32512) in fp32."""
    wide = hi.float()
    return wide + wide * code.float() * (1 / INT8_STEPS)


def nearest_with_offset(x: Tensor, offset: Tensor, nearest: Rounding = nearest_by_bits) -> Tensor:
    """Round fp32 `x` + `offset` ulps to bf16; `offset` is one number of [-1/2, 1/2) for all elements.

    Offsets spread evenly over that interval make the mean over steps right. The ulp comes from rounding a number that
    is 0.7 to 1.4 ulps further, all in fp32: a kernel converts to bf16 slowly. Inf stays Inf.
    """
    wide = _nearest_in_fp32(x.clamp(max=2.0**100))
    ulp = _nearest_in_fp32(wide * (1 + 2.0**-7.5)) - wide
    return nearest(x + offset * ulp)


def _nearest_in_fp32(x: Tensor) -> Tensor:
    """Round to 8 bits by Veltkamp's splitting (Dekker 1971), ties either way; below 2^111, where nothing overflows."""
    shifted = x * (2.0**16 + 1)
    return shifted - (shifted - x)


def _cut(x: Tensor, rounded_bits: Tensor) -> Tensor:
    """Truncate the bits to their upper half, but keep Inf and NaN of `x`, which a carry would change."""
    return torch.where(x.abs() < torch.inf, (rounded_bits & -0x10000).view(torch.float32), x).to(torch.bfloat16)


def nearest_e4m3fn(x: Tensor) -> Tensor:
    """Round fp32 `x` to the nearest e4m3fn number, ties to even; returns fp32, saturates at ±448, keeps NaN.

    Adds and subtracts 1.5 · 2^23 steps: next to that, float32 has no bits for less than a step. No compiler that keeps
    IEEE arithmetic can simplify this, but one may drop a conversion to 8 bits and back.
    """
    y = x.clamp(-_E4M3FN.max, _E4M3FN.max)
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32)  # the largest power of two <= |y|
    shift = power.clamp(min=_E4M3FN.min_normal) * (1.5 * 2.0 ** (23 - _E4M3FN.mantissa_bits))
    return (y + shift) - shift


def split_e4m3fn(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp32 `x` into an e4m3fn hi and the rest in `dtype`: bf16, or e4m3fn in units of 2^-4.

    For |x| <= 448, |x - join| <= max(2^-13 |x|, 2^-19) with a bf16 rest, and max(2^-9 |x|, 2^-14) with an e4m3fn rest.
    Above 448, hi is ±448 and a bf16 rest holds the excess. NaN is NaN in hi.
    """
    hi = nearest_e4m3fn(x)
    rest = x - hi  # exact
    if dtype == torch.float8_e4m3fn:
        rest = nearest_e4m3fn(rest * _STEP)
    return hi.to(torch.float8_e4m3fn), rest.to(dtype)


def join_e4m3fn(hi: Tensor, rest: Tensor) -> Tensor:
    """Return the sum of both parts in fp32; exact for pairs from `split_e4m3fn`."""
    return hi.float() + rest.float() / (_STEP if rest.dtype == torch.float8_e4m3fn else 1)
