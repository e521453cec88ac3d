"""fp32 in registers, bf16 pairs in memory: the arithmetic of compiled kernels.

A kernel joins a pair to fp32, computes, and splits the result again. The split needs the value of the rounded `hi` back
in fp32, and there a compiler that keeps 16-bit intermediates in fp32 makes `lo` 0. Two roundings withstand that, with
the same result:

- `nearest_by_bits` rounds by integer arithmetic on the bit pattern, which no compiler can simplify;
- `nearest_by_cast` is a plain conversion, for compilation with `transforms.EXACT_OPTIONS` only. On the CPU it is three
  times as fast in a kernel, because inductor moves every bit pattern between float and integer through memory.

Plain functions of tensors; in eager mode both are right.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Rounding: TypeAlias = Callable[[Tensor], Tensor]  # fp32 -> bf16


def nearest_by_bits(x: Tensor) -> Tensor:
    """fp32 `x` to the nearest bf16 number, ties to even. Overflow gives Inf; NaN stays NaN."""
    bits = x.view(torch.int32)
    return _cut(x, bits + (0x7FFF + ((bits >> 16) & 1)))


def nearest_by_cast(x: Tensor) -> Tensor:
    """The same as `nearest_by_bits`, as a conversion."""
    return x.to(torch.bfloat16)


def stochastic_by_bits(x: Tensor, random: Tensor) -> Tensor:
    """fp32 `x` to one of its two bf16 neighbours, the upper with probability (distance to the lower) / ulp.

    `random` is int32, uniform on [0, 2^16), shape of `x`. A bf16 number stays itself, and so do Inf and NaN.
    """
    return _cut(x, x.view(torch.int32) + random)


def split(x: Tensor, nearest: Rounding = nearest_by_bits) -> tuple[Tensor, Tensor]:
    """Split fp32 `x` into bf16 (hi, lo) with |x - hi - lo| <= max(2^-17 |x|, 2^-134) if hi is finite.

    Unlike `mcf.split.BF16.split` it leaves lo at half an ulp where it rounds there (the sum is the same), and where hi
    is Inf or NaN so is lo: a kernel has nothing to gain from the checks.
    """
    hi = nearest(x)
    return hi, (x - hi.float()).to(torch.bfloat16)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Return hi + lo in fp32: exact for every pair that `split` makes."""
    return hi.float() + lo.float()


def _cut(x: Tensor, rounded_bits: Tensor) -> Tensor:
    """The bits cut to their upper half, and `x` itself where it is Inf or NaN: those must not be carried into."""
    return torch.where(x.abs() < torch.inf, (rounded_bits & -0x10000).view(torch.float32), x).to(torch.bfloat16)
