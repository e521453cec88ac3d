"""The exponent histogram of a tensor in one pass, under half a nanosecond per element on two cores.

float32: integer arithmetic on the bit pattern gives the bin of each element. bfloat16 and float16 have so few patterns
that these are counted directly and converted to bins afterwards. `torch.bincount` counts on one thread, after two
passes for the range; adding ones at the bins (`scatter_add_`) counts on all threads, each with its own row of counts.

In the middle of a training step every small operation runs from cold caches, five times slower than in a loop. So this
work can be postponed: `count` returns counts that can be converted to histograms later, many at a time.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.histogram import BINS, ExponentHistogram, bin_of, exponent_histogram_reference
from lpconv.kernels.buffers import Buffers
from lpconv.kernels.compiled import CheckedKernel

_PIECE = 1 << 17  # elements; eagerly, the temporaries of a piece stay in cache
_COMPILED_PIECE = 1 << 19  # compiled code has no temporaries, and each call costs some 25 microseconds
_ROW = 1 << 15  # minimum elements per thread
_FLOAT32_ROWS = 1 + 23 + 254 + 1  # zero, subnormal binades, normal binades, Inf and NaN


def exponent_histogram(x: Tensor) -> ExponentHistogram:
    """The counts of `exponent_histogram_reference`, computed fast for float32, bfloat16 and float16.

    The counts are returned on the CPU, which waits for a CUDA tensor. Each calling thread keeps 6 MiB of buffers.
    Raises UsageError if x is not floating-point.
    """
    return count(x)()


def count(x: Tensor) -> Callable[[], ExponentHistogram]:
    """Read x now and return a function that makes its histogram; it holds 40 KiB per thread (128 for 16-bit dtypes)."""
    x = x.detach()
    if x.dtype == torch.float32:
        compiled = _BINS_OF_FLOAT32.wants(x)
        kernel, size = (_BINS_OF_FLOAT32, _COMPILED_PIECE) if compiled else (_BINS_OF_FLOAT32.function, _PIECE)
        return partial(_fold_float32, _count_bins(x.reshape(-1), kernel, size, _FLOAT32_ROWS * BINS))
    if x.dtype in (torch.bfloat16, torch.float16):
        counts = _count_bins(x.reshape(-1).view(torch.int16), _magnitudes, _PIECE, 2**15)
        return partial(_fold_16_bits, counts, x.dtype)
    if x.dtype == torch.float64:
        histogram = exponent_histogram_reference(x)
        return lambda: histogram
    raise UsageError(
        f"cannot make a histogram of a {x.dtype} tensor", hint="pass float64, float32, bfloat16 or float16"
    )


def prepare(tensors: Iterable[Tensor]) -> None:
    """Compile the kernels for histograms of these tensors, so that no measured step includes the compilation."""
    for device in {x.device for x in tensors if x.dtype == torch.float32 and _BINS_OF_FLOAT32.wants(x)}:
        exponent_histogram(torch.ones(_BINS_OF_FLOAT32.min_elements, device=device))


def _fold_float32(counts: Tensor) -> ExponentHistogram:
    rows = _sum_rows(counts).view(_FLOAT32_ROWS, BINS)
    totals = rows.sum(1).tolist()
    num_inf = int(rows[-1, 0])
    finite = _trim(rows[1:-1], totals[1:-1], -149)
    return dataclasses.replace(finite, num_zero=totals[0], num_inf=num_inf, num_nan=totals[-1] - num_inf)


def _bins_of_float32(x: Tensor, out: Tensor) -> Tensor:
    """The row of each element times BINS, plus the bin of its mantissa as in `bin_of`."""
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    normal = (0x7FFFFF - magnitude) >> 31  # all ones or all zeros; a comparison would widen the rest to 64 bits
    # A subnormal is an integer times 2^-149. As a float that integer shows its binade, which becomes row 1 and up.
    whole = (magnitude.float().view(torch.int32) - (126 << 23)).clamp(min=0)
    bits = (magnitude & normal) | (whole & ~normal)
    mantissa = bits & 0x7FFFFF
    sixteenths = (mantissa >> 19) + ((mantissa + 0x7FFFF) >> 19)
    # The distance to the next power of two, minus one ulp: below 2^(23-j) for mantissas from 2 - 2^-j on, so its
    # exponent is the number of fine edges below. A distance of 0 has exponent field 0 and is above them all.
    distance = (mantissa ^ 0x7FFFFF).float().view(torch.int32) >> 23
    beyond = (145 - distance).clamp(0, 7)
    row = (bits >> 23) + (23 & normal)
    return out.copy_(row * BINS + sixteenths + beyond)


def _fold_16_bits(counts: Tensor, dtype: torch.dtype) -> ExponentHistogram:
    counts = _sum_rows(counts)
    index, first, binades = _bins_of_patterns(dtype)
    inf = int(torch.tensor(math.inf, dtype=dtype).view(torch.int16))
    rows = torch.zeros(binades * BINS, dtype=torch.int64).index_add_(0, index, counts[1:inf]).view(binades, BINS)
    return dataclasses.replace(
        _trim(rows, rows.sum(1).tolist(), first),
        num_zero=int(counts[0]),
        num_inf=int(counts[inf]),
        num_nan=int(counts[inf + 1 :].sum()),
    )


def _magnitudes(patterns: Tensor, out: Tensor) -> Tensor:
    """The patterns of 16-bit numbers without their signs."""
    return out.copy_(patterns).bitwise_and_(0x7FFF)


def _bins_and_ones(device: torch.device) -> tuple[Tensor, Tensor]:
    bins = torch.empty(_COMPILED_PIECE, dtype=torch.int64, device=device)
    return bins, torch.ones(_COMPILED_PIECE, dtype=torch.int32, device=device)


_BUFFERS = Buffers(_bins_and_ones)


def _count_bins(flat: Tensor, kernel: Callable[[Tensor, Tensor], Tensor], size: int, num_bins: int) -> Tensor:
    """Number of elements per bin, (rows, num_bins), to be summed over rows; `kernel` writes the bins of a piece."""
    if flat.numel() >= 2**31:  # intermediate counts are 32-bit
        return torch.cat(
            [_sum_rows(_count_bins(part, kernel, size, num_bins))[None] for part in torch.split(flat, 2**30)]
        )
    bins, ones = _BUFFERS.on(flat.device)
    rows = max(1, min(torch.get_num_threads(), flat.numel() // _ROW))
    counts = torch.zeros(rows, num_bins, dtype=torch.int32, device=flat.device)
    for piece in (flat,) if flat.numel() <= size else torch.split(flat, size):
        piece_bins = kernel(piece, bins[: piece.numel()])
        if flat.device.type != "cpu":
            counts[0] += torch.bincount(piece_bins, minlength=num_bins)
            continue
        even = len(piece_bins) // rows * rows
        counts.scatter_add_(1, piece_bins[:even].view(rows, -1), ones[:even].view(rows, -1))
        if even < len(piece_bins):
            counts[0].scatter_add_(0, piece_bins[even:], ones[even : len(piece_bins)])
    return counts


def _sum_rows(counts: Tensor) -> Tensor:
    """The sum of the rows as int64 on the CPU."""
    return counts.sum(0, dtype=torch.int64).cpu()


@cache
def _bins_of_patterns(dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """The flat bin of each positive finite pattern of `dtype`, the first exponent and the number of binades."""
    inf = int(torch.tensor(math.inf, dtype=dtype).view(torch.int16))
    half, exponent = torch.frexp(torch.arange(1, inf, dtype=torch.int16).view(dtype).double())
    rows = exponent.long() - 1
    first = int(rows.min())
    return (rows - first) * BINS + bin_of(2 * half), first, int(rows.max()) - first + 1


def _trim(rows: Tensor, totals: list[int], first_exponent: int) -> ExponentHistogram:
    """A histogram without the empty binades at both ends; `totals` has the sum of each row."""
    used = [i for i, total in enumerate(totals) if total]
    if not used:
        return ExponentHistogram(counts=rows[:0], first_exponent=0)
    counts = rows[used[0] : used[-1] + 1].clone()
    return ExponentHistogram(counts=counts, first_exponent=first_exponent + used[0])


def _example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    fractions = torch.arange(4096, device=device, dtype=dtype) / 4096 + 1
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], device=device, dtype=dtype)
    x = torch.cat([fractions, -torch.nextafter(fractions, fractions * 0), fractions * 2.0**-130, special])
    x = x.repeat(11)  # the compiler uses threads only for 512 or more rounds each
    return x, torch.empty(x.shape, dtype=torch.int64, device=device)


# Histograms are made in large numbers, one per layer and role, so compilation pays off for smaller tensors.
_BINS_OF_FLOAT32 = CheckedKernel(_bins_of_float32, _example, min_elements=1 << 14)
