"""fp8 expansions: each component holds what the ones before leave, scaled up so that it does not underflow.

x ~ sum of component[i] · 2^(-p i) with p = 4 for e4m3fn and p = 3 for e5m2: the significant bits, hidden one included.
Without the scale the second e4m3fn component of an ordinary weight is 0. PyTorch has no fp8 arithmetic, so these are
for storage: sums and products are formed in fp32. Scale `x` into range first; |x| above the format's largest saturates.

A kernel that keeps weights in two parts, e4m3fn and what that left, splits by arithmetic that survives compiling.
"""

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.formats.spec import FORMATS

__all__ = ["STEP_BITS", "join_e4m3fn", "merge_fp8", "nearest_e4m3fn", "split_e4m3fn", "split_fp8"]

STEP_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}

_E4M3FN = FORMATS["e4m3fn"]


def split_fp8(x: Tensor, count: int = 2, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, ...]:
    """`count` components of `dtype`, shape of `x` (any floating dtype but fp64, which is rounded to fp32).

    |x - merge| <= max(2^-(5 count - 1) |x|, 2^-(10 + 4 (count - 1))) in e4m3fn for |x| <= 448, and
    max(2^-(4 count - 1) |x|, 2^-(17 + 3 (count - 1))) in e5m2 for |x| <= 57344. Larger numbers and Inf become the
    largest; NaN is NaN in the first component and 0 in the others. Raises UnsupportedError for other dtypes.
    """
    step = _step(dtype)
    largest = FORMATS["e4m3fn" if dtype == torch.float8_e4m3fn else "e5m2"].max
    rest = x.float().clamp(-largest, largest)
    parts = []
    for _ in range(count):
        part = rest.to(dtype)  # |rest| never exceeds the largest again: half an ulp times the step is at most |x|
        parts.append(part)
        rest = ((rest - part.float()) * step).nan_to_num(0.0)
    return tuple(parts)


def merge_fp8(parts: tuple[Tensor, ...]) -> Tensor:
    """The sum of the scaled components in fp32; exact for up to four components of either format."""
    step = _step(parts[0].dtype)
    total = parts[-1].float()
    for part in reversed(parts[:-1]):
        total = part.float() + total / step
    return total


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
        rest = nearest_e4m3fn(rest * 2.0 ** STEP_BITS[dtype])
    return hi.to(torch.float8_e4m3fn), rest.to(dtype)


def join_e4m3fn(hi: Tensor, rest: Tensor) -> Tensor:
    """The value of both parts in fp32; exact for what `split_e4m3fn` makes."""
    return hi.float() + rest.float() * 2.0 ** -STEP_BITS.get(rest.dtype, 0)


def _step(dtype: torch.dtype) -> float:
    if dtype not in STEP_BITS:
        raise UnsupportedError(f"no fp8 expansion in {dtype}", hint="use torch.float8_e4m3fn or torch.float8_e5m2")
    return 2.0 ** STEP_BITS[dtype]
