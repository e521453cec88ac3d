"""An e4m3fn number and what it leaves of an fp32 one, by arithmetic that survives compiling.

What is left is kept scaled up by 2^4 where it is e4m3fn too: without that it is 0 for an ordinary weight. PyTorch has
no fp8 arithmetic, so the two are for storage: sums and products are formed in fp32.
"""

import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS

_E4M3FN = FORMATS["e4m3fn"]
_STEP = 2.0**4  # of an e4m3fn rest


def nearest_e4m3fn(x: Tensor) -> Tensor:
    """fp32 `x` rounded to the nearest e4m3fn number, ties to even, still in fp32; saturates at ±448, NaN stays NaN.

    By adding and subtracting 1.5 · 2^23 steps, which leaves the adder no room below one step. No compiler that keeps
    IEEE arithmetic can simplify that, where it may drop a conversion to 8 bits and back.
    """
    y = x.clamp(-_E4M3FN.max, _E4M3FN.max)
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, at most |y|
    shift = power.clamp(min=_E4M3FN.min_normal) * (1.5 * 2.0 ** (23 - _E4M3FN.mantissa_bits))
    return (y + shift) - shift


def split_e4m3fn(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp32 `x` as e4m3fn hi and the rest in `dtype`: bf16, or e4m3fn in units of 2^-4.

    For |x| <= 448, |x - join| <= max(2^-13 |x|, 2^-19) with a bf16 rest, and max(2^-9 |x|, 2^-14) with an e4m3fn one.
    Beyond, hi is ±448 and a bf16 rest keeps on growing. NaN is NaN in hi.
    """
    hi = nearest_e4m3fn(x)
    rest = x - hi  # exact
    if dtype == torch.float8_e4m3fn:
        rest = nearest_e4m3fn(rest * _STEP)
    return hi.to(torch.float8_e4m3fn), rest.to(dtype)


def join_e4m3fn(hi: Tensor, rest: Tensor) -> Tensor:
    """The value of both parts in fp32; exact for what `split_e4m3fn` makes."""
    return hi.float() + rest.float() / (_STEP if rest.dtype == torch.float8_e4m3fn else 1)
