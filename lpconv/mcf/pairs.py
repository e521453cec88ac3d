"""fp32 in registers, bf16 pairs in memory: rounding that survives any compiler.

The compiler may keep bf16 intermediates in fp32, but it cannot simplify integer arithmetic on the bit pattern. So hi is
rounded by adding to the bits and cutting them, and hi and lo are converted to bf16 only when they are stored. Plain
functions of tensors, for use inside compiled kernels; in eager mode they run too and give the same bits.
"""

import torch
from torch import Tensor

__all__ = ["join", "round_bf16", "round_bf16_stochastic", "split"]


def round_bf16(x: Tensor) -> Tensor:
    """fp32 `x` to the nearest bf16 number, ties to even, still in fp32. Overflow gives Inf; NaN stays NaN."""
    bits = x.view(torch.int32)
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    return _as_bf16(x, rounded)


def round_bf16_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """fp32 `x` to one of its two bf16 neighbours, up with probability (distance to the lower) / ulp, still in fp32.

    `random` is int32, uniform on [0, 2^16), shape of `x`. A bf16 number stays itself, and Inf and NaN too.
    """
    return _as_bf16(x, x.view(torch.int32) + random)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `x` as bf16 (hi, lo): |x - hi - lo| <= 2^-17 |x|. Where hi is Inf or NaN, lo is 0.

    Unlike `mcf.split.split_bf16` it leaves lo at half an ulp where it rounds there; the sum is the same.
    """
    hi = round_bf16(x)
    rest = x - hi
    lo = torch.where(rest.abs() < torch.inf, rest, 0.0)
    return hi.to(torch.bfloat16), lo.to(torch.bfloat16)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """hi + lo in fp32: exact for every pair that `split` makes."""
    return hi.float() + lo.float()


def _as_bf16(x: Tensor, rounded_bits: Tensor) -> Tensor:
    """The bits cut to their upper half, and `x` itself where it is Inf or NaN: those must not be carried into."""
    return torch.where(x.abs() < torch.inf, (rounded_bits & -0x10000).view(torch.float32), x)
