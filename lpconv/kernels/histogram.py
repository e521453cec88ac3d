"""The exponent histogram of a tensor in one pass, about a nanosecond an element.

float32: integer arithmetic on the bit pattern gives each element its bin, and `torch.bincount` counts. bfloat16 and
float16 have so few patterns that the patterns themselves are counted and folded into bins afterwards.
"""

import math
from functools import cache

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.histogram import BINS, ExponentHistogram, bin_of, exponent_histogram_reference
from lpconv.kernels.compiled import CheckedKernel

__all__ = ["exponent_histogram"]

_PIECE = 1 << 17  # elements; eagerly, the temporaries of a piece stay in cache
_COMPILED_PIECE = 1 << 20  # compiled there are none, and each call costs some 50 microseconds
_LIFT = 64  # log2 of what lifts float32's subnormals among its normal numbers


def exponent_histogram(x: Tensor) -> ExponentHistogram:
    """The same counts as `exponent_histogram_reference`, fast for float32, bfloat16 and float16.

    The counts come back on the CPU, so a CUDA tensor is waited for. Raises UsageError where x is not floating.
    """
    x = x.detach()
    if x.dtype == torch.float32:
        return _of_float32(x)
    if x.dtype in (torch.bfloat16, torch.float16):
        return _of_16_bits(x)
    if x.dtype == torch.float64:
        return exponent_histogram_reference(x)
    raise UsageError(f"no histogram of a tensor of {x.dtype}", hint="pass float64, float32, bfloat16 or float16")


def _of_float32(x: Tensor) -> ExponentHistogram:
    counts = torch.zeros(256 * BINS, dtype=torch.int64, device=x.device)
    flat = x.contiguous().view(-1)
    compiled = _BINS_OF_FLOAT32.wants(x)
    kernel, size = (_BINS_OF_FLOAT32, _COMPILED_PIECE) if compiled else (_BINS_OF_FLOAT32.function, _PIECE)
    bins = torch.empty(min(size, flat.numel()), dtype=torch.int32, device=x.device)
    for piece in torch.split(flat, size) if flat.numel() else ():
        counts += torch.bincount(kernel(piece, bins[: piece.numel()]), minlength=256 * BINS)
    rows = counts.view(256, BINS).cpu()
    histogram = ExponentHistogram(
        counts=rows[1:255],
        first_exponent=-126,
        num_zero=int(rows[0, 0]),
        num_inf=int(rows[255, 0]),
        num_nan=int(rows[255, 1:].sum()),
    )
    if rows[0, 1:].any():
        subnormal = flat[(flat.abs() < 2.0**-126) & (flat != 0)]
        lifted = _of_float32(subnormal * 2.0**_LIFT)
        histogram += ExponentHistogram(counts=lifted.counts, first_exponent=lifted.first_exponent - _LIFT)
    return _trimmed(histogram)


def _bins_of_float32(x: Tensor, out: Tensor) -> Tensor:
    """The exponent field times BINS, plus the bin of the mantissa as `bin_of` numbers them."""
    bits = x.view(torch.int32)
    mantissa = bits & 0x7FFFFF
    sixteenths = (mantissa >> 19) + ((mantissa + 0x7FFFF) >> 19)
    # The distance to the next power of two, less one ulp: below 2^(23-j) for mantissas from 2 - 2^-j on, so that its
    # own exponent counts the fine edges passed. Zero has exponent field 0 and passes them all.
    distance = (mantissa ^ 0x7FFFFF).float().view(torch.int32) >> 23
    beyond = (145 - distance).clamp(0, 7)
    return out.copy_(((bits >> 23) & 0xFF) * BINS + sixteenths + beyond)


def _of_16_bits(x: Tensor) -> ExponentHistogram:
    patterns = x.contiguous().view(-1).view(torch.int16)
    counts = torch.zeros(2**15, dtype=torch.int64, device=x.device)
    for piece in torch.split(patterns, _PIECE) if patterns.numel() else ():
        counts += torch.bincount(piece.int() & 0x7FFF, minlength=2**15)
    counts = counts.cpu()
    index, first, binades = _bins_of_patterns(x.dtype)
    inf = int(torch.tensor(math.inf, dtype=x.dtype).view(torch.int16))
    rows = torch.zeros(binades * BINS, dtype=torch.int64).index_add_(0, index, counts[1:inf])
    return _trimmed(
        ExponentHistogram(
            counts=rows.view(binades, BINS),
            first_exponent=first,
            num_zero=int(counts[0]),
            num_inf=int(counts[inf]),
            num_nan=int(counts[inf + 1 :].sum()),
        )
    )


@cache
def _bins_of_patterns(dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """The flat bin of each positive finite pattern of `dtype`, the first exponent and the number of binades."""
    inf = int(torch.tensor(math.inf, dtype=dtype).view(torch.int16))
    half, exponent = torch.frexp(torch.arange(1, inf, dtype=torch.int16).view(dtype).double())
    rows = exponent.long() - 1
    first = int(rows.min())
    return (rows - first) * BINS + bin_of(2 * half), first, int(rows.max()) - first + 1


def _trimmed(histogram: ExponentHistogram) -> ExponentHistogram:
    """The same without empty binades at either end."""
    used = histogram.counts.sum(1).nonzero().flatten().tolist()
    first, last = (used[0], used[-1]) if used else (0, -1)
    return ExponentHistogram(
        counts=histogram.counts[first : last + 1].clone(),
        first_exponent=histogram.first_exponent + first if used else 0,
        num_zero=histogram.num_zero,
        num_inf=histogram.num_inf,
        num_nan=histogram.num_nan,
    )


def _example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    fractions = torch.arange(4096, device=device, dtype=dtype) / 4096 + 1
    x = torch.cat([fractions, torch.nextafter(fractions, fractions * 0), fractions * 2.0**-130])
    return x, torch.empty(x.shape, dtype=torch.int32, device=device)


# Histograms come many at a time, one per layer and role: compiling pays for smaller tensors than elsewhere.
_BINS_OF_FLOAT32 = CheckedKernel(_bins_of_float32, _example, min_elements=1 << 16)
