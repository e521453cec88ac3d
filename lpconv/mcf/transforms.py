"""Error-free transforms: a sum or product as its rounded value plus its exact rounding error.

All steps are in the format of the inputs, so the error is a number of that format too. This relies on PyTorch computing
a bf16 or fp16 operation in fp32 and rounding once to nearest even. Eager mode does that; the default `torch.compile`
does NOT: inductor keeps 16-bit intermediates in fp32, even across explicit casts, and every error term becomes 0.
Compile these functions with `EXACT_OPTIONS`, a private option that older releases lack or crash on, so test it first;
or use `lpconv.mcf.pairs`, which no compiler can simplify.

Sources: Dekker 1971 (Fast2Sum), Knuth TAOCP 2 (TwoSum), Ogita, Rump & Oishi 2005 (TwoProd with an FMA).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError

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
