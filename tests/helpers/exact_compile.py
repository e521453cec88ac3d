"""Whether this build of torch.compile can keep 16-bit roundings, a private option."""

import functools

import torch

from lpconv.mcf.expansion import EXACT_OPTIONS, fast_two_sum

__all__ = ["compile_keeps_roundings"]


@functools.cache
def compile_keeps_roundings() -> bool:
    """Whether a compiled Fast2Sum gives eager's error terms here. Takes seconds, once."""
    # Ordered pairs half a binade apart: most sums drop bits, so a missing rounding cannot go unseen.
    a = torch.arange(1.0, 65.0).to(torch.bfloat16)
    b = (a.float() / 37).to(torch.bfloat16)
    try:
        found = torch.compile(fast_two_sum, options=EXACT_OPTIONS)(a, b)
    except Exception:  # any failure of a private option, in any release, means: no
        return False
    return all(torch.equal(f, e) for f, e in zip(found, fast_two_sum(a, b), strict=True))
