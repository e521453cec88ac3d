"""Compiling bf16 arithmetic whose intermediate roundings matter.

By default inductor keeps 16-bit intermediates in fp32, across explicit casts too. For an error-free transform that is
fatal: the compiled error terms are 0. The `emulate_precision_casts` option keeps every rounding. It is a private option
that older releases lack or crash on, so it is checked by running it, not by version.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from lpconv.errors import UnsupportedError
from lpconv.mcf.transforms import fast_two_sum

__all__ = ["EXACT_OPTIONS", "compile_exact", "compile_keeps_roundings"]

P = ParamSpec("P")
R = TypeVar("R")

EXACT_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"emulate_precision_casts": True}


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
