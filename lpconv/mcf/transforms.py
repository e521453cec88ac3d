"""Error-free transforms: a sum or product as its rounded value plus exactly what the rounding dropped.

All steps are in the format of the inputs, so that the error is a number of that format too. This leans on PyTorch
computing a bf16 or fp16 operation in fp32 and rounding it once to nearest even, which eager mode does and the default
`torch.compile` does NOT: inductor keeps 16-bit intermediates in fp32, across explicit casts too, and every error term
becomes 0. Compile these functions with `compile_exact`, or use `lpconv.mcf.pairs`, which no compiler can simplify. The
option behind it, `emulate_precision_casts`, is a private one that older releases lack or crash on, so it is checked by
running it, not by version.

Sources: Dekker 1971 (Fast2Sum), Knuth TAOCP 2 (TwoSum), Ogita, Rump & Oishi 2005 (TwoProd with an FMA).
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError

__all__ = [
    "EXACT_OPTIONS",
    "compile_exact",
    "compile_keeps_roundings",
    "fast_two_sum",
    "two_prod",
    "two_prod_scalar",
    "two_sum",
]

P = ParamSpec("P")
R = TypeVar("R")

EXACT_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"emulate_precision_casts": True}
_PRODUCT_DTYPES = (torch.bfloat16, torch.float16)


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(s, e) with s = fl(a + b) and s + e = a + b exactly, if exponent(a) >= exponent(b) or a is 0, and s is finite.

    Unordered, e is wrong for 4 in 10 random pairs; use `two_sum` where the order is not known. Any floating dtype.
    """
    s = a + b
    return s, b - (s - a)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(s, e) with s = fl(a + b) and s + e = a + b exactly, in any order, if no step overflows. Any floating dtype."""
    s = a + b
    b_part = s - a
    return s, (a - (s - b_part)) + (b - b_part)


def two_prod(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(p, e) with p = fl(a · b) and p + e = a · b exactly, if p is finite and e does not underflow.

    e is a multiple of ulp(a) · ulp(b), so exponent(a) + exponent(b) >= -119 is enough in bf16 and >= -4 in fp16 (scale
    fp16 operands). 0 counts as any exponent. bf16 and fp16 only, where the exact product fits the fp32 that PyTorch
    computes `addcmul` in; other dtypes raise UnsupportedError.
    """
    _check_product_dtype(a)
    p = a * b
    return p, torch.addcmul(-p, a, b)


def two_prod_scalar(a: Tensor, b: float) -> tuple[Tensor, Tensor]:
    """`two_prod` with a Python number, which must be a number of the format of `a` (see `expansion.expand_scalar`).

    Not by `torch.add(alpha=b)`: on the CPU it rounds the product in the last few elements of a tensor, outside its
    vector loop, and e is 0 there.
    """
    return two_prod(a, torch.tensor(b, dtype=a.dtype, device=a.device))


def _check_product_dtype(a: Tensor) -> None:
    if a.dtype not in _PRODUCT_DTYPES:
        raise UnsupportedError(
            f"no exact product in {a.dtype}",
            hint="use bf16 or fp16; wider products need a true FMA, which PyTorch lacks",
        )


def compile_exact(function: Callable[P, R], device: torch.device | str = "cpu") -> Callable[P, R]:
    """`function`, compiled with every 16-bit rounding kept; raises UnsupportedError where this build cannot do that."""
    if not compile_keeps_roundings(str(device)):
        raise UnsupportedError(
            f"torch.compile drops bf16 roundings on {device} in torch {torch.__version__}", hint="run eagerly instead"
        )
    return torch.compile(function, options=EXACT_OPTIONS, dynamic=True)


@functools.cache
def compile_keeps_roundings(device: str = "cpu") -> bool:
    """Whether a compiled Fast2Sum gives eager's error terms here. Runs once per device; takes seconds."""
    # Ordered pairs half a binade apart: most sums drop bits, so a missing rounding cannot go unseen.
    a = torch.arange(1.0, 65.0, device=device).to(torch.bfloat16)
    b = (a.float() / 37).to(torch.bfloat16)
    try:
        found = torch.compile(fast_two_sum, options=EXACT_OPTIONS)(a, b)
    except Exception:  # any failure of a private option, in any release, means: no
        return False
    return all(torch.equal(f, e) for f, e in zip(found, fast_two_sum(a, b), strict=True))
