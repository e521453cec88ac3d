"""Split fp32 into an e4m3fn number and the rest, with arithmetic that survives compilation.

An e4m3fn rest is stored multiplied by 2^4: without that it would be 0 for ordinary weights. PyTorch has no fp8
arithmetic, so both parts are for storage only; sums and products are computed in fp32.
"""

import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS

_E4M3FN = FORMATS["e4m3fn"]
_STEP = 2.0**4  # factor of an e4m3fn rest


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
