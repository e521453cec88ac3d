"""Powers of two near a number, and the statistics of a tensor, its rows or its blocks that scales come from.

A scaled value is `scale · component`, and components are stored in the format, so x is *divided* by its scale. With
powers of two that division is exact (barring underflow), so they are the default everywhere in lpconv.
"""

import math
import sys
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lpconv.errors import UsageError

FloatOrTensor = TypeVar("FloatOrTensor", float, Tensor)
Array = np.ndarray[Any, Any]

_MIN_EXPONENT, _MAX_EXPONENT = -126, 127  # the normal range of fp32 and bf16, so no scale is ever subnormal


def pow2_floor(x: FloatOrTensor) -> FloatOrTensor:
    """Return the largest power of two <= |x|, within [2^-126, 2^127].

    Exact, in x's dtype. Zero stays 0 (it has no exponent, so the caller decides), Inf becomes +Inf, NaN stays NaN. The
    result of a float16 tensor stays within float16's range, 2^-24 to 2^15.
    """
    return _pow2(x, 2.0)


def pow2_ceil(x: FloatOrTensor) -> FloatOrTensor:
    """Return the smallest power of two >= |x|, with the range and special values of `pow2_floor`."""
    return _pow2(x, 1.0 + sys.float_info.epsilon)


def pow2_nearest(x: FloatOrTensor) -> FloatOrTensor:
    """Return the power of two nearest to |x| in ratio; otherwise like `pow2_floor`.

    The quotient of |x| and the result is in (1/√2, √2). The ratio decides, not the difference, because a scale
    multiplies. No float equals √2, so there are no ties.
    """
    return _pow2(x, math.sqrt(2))  # the float64 just above √2


def _pow2(x: FloatOrTensor, up: float) -> FloatOrTensor:
    """The power of two below |x|, or above it if the significand (in [1, 2)) is at least `up`."""
    if isinstance(x, Tensor):
        return _pow2_tensor(x, up)
    if x == 0 or not math.isfinite(x):
        return abs(x)
    half, exponent = math.frexp(abs(x))
    exponent += -1 if 2 * half < up else 0
    return math.ldexp(1.0, min(max(exponent, _MIN_EXPONENT), _MAX_EXPONENT))


def _pow2_tensor(x: Tensor, up: float) -> Tensor:
    info = torch.finfo(x.dtype)
    low = max(_MIN_EXPONENT, math.frexp(info.smallest_normal * info.eps)[1] - 1)
    high = min(_MAX_EXPONENT, math.frexp(info.max)[1] - 1)
    wide = x.detach().abs() if x.dtype == torch.float32 else x.detach().double().abs()
    integer, bits, bias = (torch.int32, 23, 127) if x.dtype == torch.float32 else (torch.int64, 52, 1023)
    # A significand that reaches `up` carries into the exponent. Subnormal numbers are below `low` in any case.
    carry = (2 << bits) - math.ceil(math.ldexp(up, bits))
    field = ((wide.view(integer) + carry) >> bits).clamp_(low + bias, high + bias)
    return torch.where((wide == 0) | ~wide.isfinite(), wide, (field << bits).view(wide.dtype)).to(x.dtype)


def normal_pow2_ceil(x: Array) -> Array:
    """`pow2_ceil` of positive normal fp32 numbers up to 2^127, twenty times faster with two bit operations."""
    return ((x.view(np.int32) + 0x7FFFFF) & 0x7F800000).view(np.float32)


def normal_pow2_floor(x: Array) -> Array:
    """`pow2_floor` of positive fp64 numbers up to 2^127, equally fast but without a lower bound: subnormals give 0."""
    return (x.view(np.int64) & 0x7FF << 52).view(np.float64)


def amax(x: Tensor, block: tuple[int, ...] | None = None) -> Tensor:
    """Return the largest |x| of the tensor or of each block; NaN if there is a NaN, 0 if there are no elements.

    `block` is the block size along each axis, -1 for the whole axis: (1, -1) gives one number per row, (1, 32) per MX
    block, (128, 128) per tile. None means the whole tensor. Returns x's dtype, of shape () or the grid of blocks.
    """
    blocks, axes = _blocks(x.detach(), block)
    if x.numel() == 0:
        return blocks.sum(axes)
    return torch.maximum(blocks.amax(axes), -blocks.amin(axes))  # no |x| is stored


def rms(x: Tensor, block: tuple[int, ...] | None = None) -> Tensor:
    """Return sqrt(mean(x²)) of the tensor or of each block (as in `amax`); 0 if there are no elements.

    Computed in float64.
    """
    blocks, axes = _blocks(x.detach(), block)
    count = math.prod(blocks.shape[a] for a in axes)
    norm: Tensor = torch.linalg.vector_norm(blocks, dim=axes, dtype=torch.float64)
    return norm / math.sqrt(max(count, 1))


def _blocks(x: Tensor, block: tuple[int, ...] | None) -> tuple[Tensor, tuple[int, ...]]:
    """Return `x` with each axis split into (grid, within block), and the axes within a block."""
    if block is None:
        return x, tuple(range(x.ndim))
    if len(block) != x.ndim:
        raise UsageError(f"block {block} has {len(block)} sizes, but the tensor has {x.ndim} axes")
    sizes = [size if b == -1 else b for b, size in zip(block, x.shape, strict=True)]
    if any(b < 1 or size % b for b, size in zip(sizes, x.shape, strict=True) if size):
        raise UsageError(
            f"blocks of {tuple(block)} do not evenly divide a tensor of shape {tuple(x.shape)}",
            hint="choose a block size that divides each axis, or -1 for the whole axis",
        )
    split = [n for size, b in zip(x.shape, sizes, strict=True) for n in (size // max(b, 1), b)]
    return x.reshape(split), tuple(range(1, 2 * x.ndim, 2))
