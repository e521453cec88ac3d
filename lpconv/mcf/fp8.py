"""fp8 expansions: each component holds what the ones before leave, scaled up so that it does not underflow.

x ~ sum of component[i] · 2^(-p i) with p = 4 for e4m3fn and p = 3 for e5m2: the significant bits, hidden one included.
Without the scale the second e4m3fn component of an ordinary weight is 0. PyTorch has no fp8 arithmetic, so these are
for storage: sums and products are formed in fp32. Scale `x` into range first; |x| above the format's largest saturates.
"""

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.formats.spec import FORMATS

__all__ = ["STEP_BITS", "merge_fp8", "split_fp8"]

STEP_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}


def split_fp8(x: Tensor, count: int = 2, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, ...]:
    """`count` components of `dtype`, shape of `x` (any floating dtype but fp64, which is rounded to fp32).

    |x - merge| <= max(2^-(5 count - 1) |x|, 2^-(10 + 4 (count - 1))) in e4m3fn for |x| <= 448, and
    max(2^-(4 count - 1) |x|, 2^-(17 + 3 (count - 1))) in e5m2 for |x| <= 57344. Larger numbers and Inf become the
    largest; NaN is NaN in the first component and 0 in the others. Raises UnsupportedError for other dtypes.
    """
    step = _step(dtype)
    largest = FORMATS["e4m3fn" if dtype == torch.float8_e4m3fn else "e5m2"].max
    rest = x.float().clamp(-largest, largest)
    parts = []
    for _ in range(count):
        part = rest.to(dtype)  # |rest| never exceeds the largest again: half an ulp times the step is at most |x|
        parts.append(part)
        rest = ((rest - part.float()) * step).nan_to_num(0.0)
    return tuple(parts)


def merge_fp8(parts: tuple[Tensor, ...]) -> Tensor:
    """The sum of the scaled components in fp32; exact for up to four components of either format."""
    step = _step(parts[0].dtype)
    total = parts[-1].float()
    for part in reversed(parts[:-1]):
        total = part.float() + total / step
    return total


def _step(dtype: torch.dtype) -> float:
    if dtype not in STEP_BITS:
        raise UnsupportedError(f"no fp8 expansion in {dtype}", hint="use torch.float8_e4m3fn or torch.float8_e5m2")
    return 2.0 ** STEP_BITS[dtype]
