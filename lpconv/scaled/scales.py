"""Arithmetic of scales: powers of two, as Python floats while static and as 0-dim fp32 tensors if data set them.

A static scale costs nothing: it is a constant of the graph. A dynamic one stays on the device and is never read. The
same formulas serve both. Scales stay in [2^-126, 2^127], where fp32 represents a power of two as a normal number; only
a *statically* known zero has the scale 0, which means "any scale".
"""

import math
from collections import Counter

import torch
from torch import Tensor

from lpconv.formats.scale import pow2_floor
from lpconv.kernels.compiled import is_compiling

Scale = float | Tensor

MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**127
MODERATE_SCALE = 2.0**40  # a recurrence can double its scale at every step; beyond this, data would vanish
_LARGEST_NUMBER = 2.0**64


def split_number(x: float) -> tuple[float, float]:
    """`x` as (mantissa, scale) with 1 ≤ |mantissa| < 2 and a power-of-two scale; (0, 0) for zero.

    Infinities, NaN and substitutes for infinity (-1e38, a start for maxima) keep the scale 1: with their own scale,
    other operands would vanish. So do numbers whose exponent a scale cannot represent.
    """
    if x == 0:
        return 0.0, 0.0
    if not math.isfinite(x) or not MIN_SCALE <= abs(x) <= _LARGEST_NUMBER:
        return x, 1.0
    scale = pow2_floor(x)
    return x / scale, scale


def static(scale: Scale) -> float:
    """A scale of a method whose scales are all static."""
    assert isinstance(scale, float), scale
    return scale


def larger_scale(a: Scale, b: Scale) -> Scale:
    """The larger of two scales, which is 2^⌊log2 √(a² + b²)⌋ for powers of two (Scalify, rule of add)."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if isinstance(a, float):
            return b if a == 0 else torch.clamp(b, min=a)  # type: ignore[arg-type]  # one of the two is a tensor
        return a if isinstance(b, float) and b == 0 else torch.clamp(a, min=b)
    return max(a, b)


def ratio(a: Scale, b: Scale) -> Scale:
    """a / b, or 0 if either is a static zero (a zero of any scale stays zero)."""
    if (isinstance(a, float) and a == 0) or (isinstance(b, float) and b == 0):
        return 0.0
    return a / b


def multiply(a: Scale, b: Scale) -> Scale:
    """a · b, unclamped; a static zero gives zero."""
    if isinstance(a, float) and isinstance(b, Tensor):
        return 0.0 if a == 0 else b * a
    if isinstance(b, float) and isinstance(a, Tensor) and b == 0:
        return 0.0
    return a * b


def clamp_scale(
    scale: Scale, counts: "Counter[str]", least: float = MIN_SCALE, most: float = MAX_SCALE
) -> tuple[Scale, float]:
    """Clamp `scale` to [least, most]; also returns the factor by which the data must be multiplied to keep the value.

    A factor other than 1 is counted as ``scale saturated``. A dynamic scale on a GPU, or in a compiled graph, is not
    read: it is kept above 2^-126, and one beyond 2^127 becomes infinite, so that an overflow is visible.
    """
    if isinstance(scale, Tensor) and (scale.device.type != "cpu" or is_compiling()):
        return torch.clamp(scale, min=MIN_SCALE), 1.0
    power = float(scale)
    if power == 0 or least <= power <= most or (isinstance(scale, Tensor) and not math.isfinite(power)):
        return scale, 1.0
    counts["scale saturated"] += 1
    inside = min(max(power, least), most)
    return torch.full_like(scale, inside) if isinstance(scale, Tensor) else inside, power / inside


def times(data: Tensor, factor: Scale) -> Tensor:
    """data · factor in the dtype of `data`, or in fp32 for integers; a factor of exactly 1 costs nothing.

    16-bit data are multiplied by a tensor factor in fp32, because PyTorch would first round the factor to 16 bits,
    where 2^-30 is 0.
    """
    if isinstance(factor, (float, complex)):
        return data if factor == 1.0 else data * factor
    if data.is_floating_point():
        return (data.to(torch.promote_types(data.dtype, torch.float32)) * factor).to(data.dtype)
    return data * factor


def uninitialised_like(data: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """New memory with the shape, strides and storage offset of `data`, which must not overlap; gaps stay unused."""
    sizes = zip(data.shape, data.stride(), strict=True)
    span = data.storage_offset() + 1 + sum((size - 1) * stride for size, stride in sizes) if data.numel() else 0
    memory = data.new_empty(span, dtype=dtype or data.dtype)
    return memory.as_strided(data.shape, data.stride(), data.storage_offset())
