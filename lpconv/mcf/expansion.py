"""Arithmetic on bf16 expansions of length 2: a value stored as the unevaluated sum x + dx with |dx| <= ulp(x) / 2.

It is made of error-free transforms: a sum or product as its rounded value plus its exact rounding error (Dekker 1971,
Fast2Sum; Knuth TAOCP 2, TwoSum; Ogita, Rump & Oishi 2005, TwoProd with an FMA). All their steps are in the format of
the inputs, so the error is a number of that format too. This relies on PyTorch computing a bf16 or fp16 operation in
fp32 and rounding once to nearest even. Eager mode does that; the default `torch.compile` does NOT: inductor keeps
16-bit intermediates in fp32, even across explicit casts, and every error term becomes 0. Compile these functions with
`EXACT_OPTIONS`, a private option that older releases lack or crash on, so test it first; or use `lpconv.mcf.pairs`,
which no compiler can simplify.

u = 2^-8 is the unit roundoff of bf16. `grow` is Algorithm 1 of Collage (arXiv 2405.03637); `add` and `mul` are the
usual double-word operations (Dekker 1971; Joldes, Muller & Popescu 2017). All results are new tensors: the paper's
released code multiplies in place, then reads the overwritten operand, and ends with a third of the true second moment.

fp16 and fp8 pairs have no such arithmetic: their low part carries a scale, and removing it underflows. Merge them,
compute in fp32, split again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.formats.cast import cast

Pair = tuple[Tensor, Tensor]


EXACT_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"emulate_precision_casts": True}
_PRODUCT_DTYPES = (torch.bfloat16, torch.float16)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, e) with s = fl(a + b) and s + e = a + b exactly, if |a| >= |b| and s is finite.

    exponent(a) >= exponent(b) or a = 0 suffices. In the wrong order, e is wrong for 4 in 10 random pairs; use `two_sum`
    if the order is unknown. Any floating dtype.
    """
    s = a + b
    return s, b - (s - a)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (s, e) with s = fl(a + b) and s + e = a + b exactly, in any order, if no step overflows.

    Any floating dtype.
    """
    s = a + b
    b_part = s - a
    return s, (a - (s - b_part)) + (b - b_part)


def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (p, e) with p = fl(a · b) and p + e = a · b exactly, if p is finite and e does not underflow.

    e is a multiple of ulp(a) · ulp(b), so exponent(a) + exponent(b) >= -119 is enough in bf16 and >= -4 in fp16 (scale
    fp16 operands). 0 counts as any exponent. bf16 and fp16 only, since their exact product fits the fp32 in which
    PyTorch computes `addcmul`; other dtypes raise UnsupportedError.
    """
    if a.dtype not in _PRODUCT_DTYPES:
        raise UnsupportedError(
            f"products in {a.dtype} are not exact",
            hint="use bf16 or fp16; wider dtypes need a true FMA, which PyTorch lacks",
        )
    p = a * b
    return p, torch.addcmul(-p, a, b)


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
    exact, fmt = torch.tensor(value, dtype=torch.float64), {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    hi = cast(exact, fmt)  # `to` would convert fp64 through fp32, and so round twice
    return float(hi), float(cast(exact - hi, fmt))
