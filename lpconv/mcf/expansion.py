"""Arithmetic on bf16 expansions of length 2: a value stored as the unevaluated sum x + dx with |dx| <= ulp(x) / 2.

u = 2^-8 is the unit roundoff of bf16. `grow` is Algorithm 1 of Collage (arXiv 2405.03637); `add` and `mul` are the
usual double-word operations (Dekker 1971; Joldes, Muller & Popescu 2017). All results are new tensors: the paper's
released code multiplies in place, then reads the overwritten operand, and ends with a third of the true second moment.

The error bounds hold in eager mode and when compiled with `transforms.EXACT_OPTIONS`. fp16 and fp8 pairs have no such
arithmetic: their low part carries a scale, and removing it underflows. Merge them, compute in fp32, split again.
"""

import math

import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS, Format
from lpconv.mcf.transforms import fast_two_sum, two_prod, two_sum

Pair = tuple[Tensor, Tensor]


def grow(x: Pair, a: Tensor) -> Pair:
    """Return x + a for |x| >= |a|, rounding only the low part: the error is at most u |dx + e| <= 3 u^2 |x|.

    e is the rounding error of fl(x + a). If |x| < |a| (weights that start at zero), e is wrong and bits are lost as in
    plain bf16: use `add` with a zero low part instead.
    """
    s, e = fast_two_sum(x[0], a)
    return fast_two_sum(s, x[1] + e)


def add(x: Pair, y: Pair) -> Pair:
    """Return x + y for pairs in any order of magnitude. The error is at most 4 u^2 (|x| + |y|)."""
    s, e = two_sum(x[0], y[0])
    return fast_two_sum(s, e + (x[1] + y[1]))


def mul(x: Pair, y: Pair) -> Pair:
    """Return x · y with a relative error of at most 8 u^2, if the parts do not underflow (see `two_prod`).

    The product dx · dy is dropped.
    """
    p, e = two_prod(x[0], y[0])
    return fast_two_sum(p, e + (x[0] * y[1] + x[1] * y[0]))


def expand_scalar(value: float, dtype: torch.dtype = torch.bfloat16) -> tuple[float, float]:
    """Split a Python number into hi + lo, both numbers of `dtype` (bf16 or fp16), rounded from fp64.

    beta2 = 0.999 becomes (1.0, -0.00099945...): in bf16 alone it would be 1, and the second moment would never decay.
    """
    fmt = {torch.bfloat16: FORMATS["bf16"], torch.float16: FORMATS["fp16"]}[dtype]
    hi = _nearest(value, fmt)
    return hi, _nearest(value - hi, fmt)


def _nearest(value: float, fmt: Format) -> float:
    """Round to nearest even. Computed here because PyTorch converts fp64 through fp32, which rounds twice."""
    exponent = max(math.frexp(value)[1] - 1, fmt.min_exponent)
    ulp = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    return round(value / ulp) * ulp
