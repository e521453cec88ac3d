"""Blocks of a tensor to codes and back, with what the rounding cost. Pure functions of tensors and a workspace.

The work is done in blocks of `BLOCK_ELEMENTS`, small enough that the dozen passes of eager PyTorch over one block run
in the cache; a `Workspace` holds the buffers of one thread, so that nothing is allocated per block.

Errors are of the decoded value against the source's fp32 value, over its finite elements. Where rounding makes a
non-zero element zero its relative error is exactly 1, which is how flushed elements are found without another pass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.formats.spec import Format
from lpconv.kernels.decode import decode
from lpconv.mcf import multipoint
from lpconv.mcf.multipoint import Fit, Points
from lpconv.mcf.point_layout import PointLayout
from lpconv.mcf.split import SCRATCH_ELEMENTS, Residual

__all__ = [
    "BLOCK_ELEMENTS",
    "BlockError",
    "BlockStats",
    "Workspace",
    "as_float32",
    "block_ranges",
    "block_stats",
    "decode_scaled",
    "encode_pair",
    "encode_points",
    "encode_scaled",
    "fit_points",
    "fits_exactly",
    "scale_for",
]

BLOCK_ELEMENTS = 2**18
# fp32 squares overflow from 2^64 on and lose everything below 2^-75: sums below this and infinite ones are taken again
# in fp64.
_SQUARES_LOW = 1e-30
_SCALE_EXPONENTS = (-126, 127)


class Workspace:
    """Buffers of one worker thread: raw source bytes, fp32 scratch, and room for the codes of a block."""

    def __init__(self) -> None:
        self.raw = torch.empty(BLOCK_ELEMENTS * 8, dtype=torch.uint8)
        self.value, self.coded, self.error = (torch.empty(BLOCK_ELEMENTS) for _ in range(3))
        self.split = torch.empty(SCRATCH_ELEMENTS)

    @property
    def num_bytes(self) -> int:
        buffers = (self.raw, self.value, self.coded, self.error, self.split)
        return sum(b.numel() * b.element_size() for b in buffers)


@dataclass(frozen=True, kw_only=True)
class BlockStats:
    """Σx² and max |x| over the finite elements of a block, and the counts of what is not finite."""

    num_elements: int = 0
    sum_squares: float = 0.0
    absmax: float = 0.0
    num_nan: int = 0
    num_inf: int = 0

    def __add__(self, other: "BlockStats") -> "BlockStats":
        return BlockStats(
            num_elements=self.num_elements + other.num_elements,
            sum_squares=self.sum_squares + other.sum_squares,
            absmax=max(self.absmax, other.absmax),
            num_nan=self.num_nan + other.num_nan,
            num_inf=self.num_inf + other.num_inf,
        )

    @property
    def rms(self) -> float:
        """sqrt(E[x²]) over the finite elements, 0 where there are none."""
        count = self.num_elements - self.num_nan - self.num_inf
        return math.sqrt(self.sum_squares / count) if count else 0.0


@dataclass(frozen=True, kw_only=True)
class BlockError:
    """Σ(x - x̂)², max |x - x̂| / |x|, and how many finite elements became infinite or non-zero ones zero."""

    sum_squares: float = 0.0
    max_relative: float = 0.0
    num_saturated: int = 0
    num_flushed: int = 0

    def __add__(self, other: "BlockError") -> "BlockError":
        return BlockError(
            sum_squares=self.sum_squares + other.sum_squares,
            max_relative=max(self.max_relative, other.max_relative),
            num_saturated=self.num_saturated + other.num_saturated,
            num_flushed=self.num_flushed + other.num_flushed,
        )


def block_ranges(num_elements: int, cols: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks of a tensor, in order: whole rows of `cols` elements, at least one."""
    size = max(BLOCK_ELEMENTS // cols, 1) * cols if num_elements else 1
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)


def as_float32(x: Tensor, work: Workspace) -> Tensor:
    """`x` (1-D, any floating dtype) in fp32: itself, or converted into the workspace. fp64 is rounded to fp32 first."""
    return x if x.dtype == torch.float32 else work.value[: x.numel()].copy_(x)


def block_stats(x: Tensor, work: Workspace) -> BlockStats:
    """Statistics of one block of a source tensor (1-D, any floating dtype)."""
    value = as_float32(x, work)
    sum_squares = float(torch.dot(value, value))
    low, high = _range(value)
    if _SQUARES_LOW < sum_squares < math.inf:
        return BlockStats(num_elements=x.numel(), sum_squares=sum_squares, absmax=max(-low, high))
    exact = value.double()
    finite = exact[torch.isfinite(exact)]
    num_nan = int(torch.isnan(value).sum())
    return BlockStats(
        num_elements=x.numel(),
        sum_squares=float(torch.dot(finite, finite)),
        absmax=float(finite.abs().max()) if finite.numel() else 0.0,
        num_nan=num_nan,
        num_inf=x.numel() - finite.numel() - num_nan,
    )


def scale_for(stats: BlockStats, fmt: Format, rounding: str) -> float:
    """The scale σ of a tensor, so that x / σ has unit RMS: arXiv 2303.11257 §5.3 step 1, 2407.17353 §2.

    `rounding` makes it a power of two (``nearest`` in the logarithm, or ``floor``) or leaves it ``exact`` (an fp32
    number). Departure from both papers: σ grows to the next power of two that keeps the largest element inside the
    format, because a saturated outlier costs more than a binade of everything else. An all-zero tensor has scale 1.
    """
    rms = stats.rms
    if rms == 0:
        return 1.0
    floor = max(stats.absmax / fmt.max, 2.0 ** _SCALE_EXPONENTS[0])
    if rounding == "exact":
        return float(torch.tensor(min(max(rms, floor), 2.0 ** _SCALE_EXPONENTS[1]), dtype=torch.float32))
    exponent = math.frexp(rms * math.sqrt(2))[1] - 1 if rounding == "nearest" else math.frexp(rms)[1] - 1
    mantissa, needed = math.frexp(floor)
    exponent = max(exponent, needed - 1 if mantissa == 0.5 else needed)
    return math.ldexp(1.0, min(max(exponent, _SCALE_EXPONENTS[0]), _SCALE_EXPONENTS[1]))


def fits_exactly(x: Tensor, scale: float, work: Workspace) -> bool:
    """Whether every element of a block survives x / scale · scale in fp32: false only where x / scale is subnormal."""
    value = as_float32(x, work)
    coded = torch.mul(value, 1 / scale, out=work.coded[: x.numel()])
    back = torch.mul(coded, scale, out=work.error[: x.numel()])
    return torch.equal(back.view(torch.int32), value.view(torch.int32)) or torch.equal(
        torch.nan_to_num(back), torch.nan_to_num(value)
    )


def encode_scaled(x: Tensor, scale: float, fmt: Format, codes: Tensor, work: Workspace, *, finite: bool) -> BlockError:
    """Write the codes of one block of x / scale into `codes` and return the error against x.

    `x` is 1-D of any floating dtype, `codes` 1-D of the format's dtype. `finite` says that the tensor has no NaN or
    Inf; with them NaN stays NaN, and Inf stays Inf or becomes NaN in formats without Inf: never a usable number.
    """
    value = as_float32(x, work)
    coded = codes if codes.dtype == torch.float32 else work.coded[: x.numel()]
    # Powers of two have an exact reciprocal; dividing is right for every scale but slower.
    if math.frexp(scale)[0] == 0.5:
        torch.mul(value, 1 / scale, out=coded)
    else:
        torch.div(value, scale, out=coded)
    if not finite and not fmt.has_inf:
        coded.masked_fill_(torch.isinf(coded), math.nan)
    if coded is not codes:
        codes.copy_(coded)
    return _error(value, decode_scaled(codes, scale, out=work.error[: x.numel()]))


def decode_scaled(codes: Tensor, scale: float, *, out: Tensor | None = None) -> Tensor:
    """codes · scale in fp32, same shape; `codes` has the dtype of a format that scaled checkpoints use."""
    if out is None:
        out = torch.empty(codes.shape)
    if codes.dtype == torch.float32:
        return torch.mul(codes, scale, out=out)
    value = decode(codes, torch.float32, out=out) if codes.dtype.itemsize == 1 else out.copy_(codes)
    return value.mul_(scale)


def encode_pair(x: Tensor, residual: Residual, high: Tensor, low: Tensor, work: Workspace) -> BlockError:
    """Write one block's 16-bit numbers and residuals and return the error of their sum against x."""
    value = as_float32(x, work)
    residual.split(value, out=(high, low), scratch=work.split)
    merged = residual.merge(high, low, out=work.error[: x.numel()], scratch=work.split)
    return _error(value, merged)


def fit_points(x: Tensor, layout: PointLayout, points_max: int, work: Workspace) -> Fit:
    """The fit of a block of whole rows, 1-D and finite."""
    return multipoint.fit(as_float32(x, work).view(-1, layout.cols), layout.element, points_max)


def encode_points(x: Tensor, points: Points, layout: PointLayout, work: Workspace) -> tuple[Tensor, BlockError]:
    """The bytes of the points of a block of whole rows, and the error of their sums against x."""
    value = as_float32(x, work)
    coded = multipoint.encode(value.view(-1, layout.cols), points, layout.element)
    got = multipoint.decode(coded, points, layout.element)
    return coded.view(-1), _error(value, got.view(-1))


def _error(wanted: Tensor, got: Tensor) -> BlockError:
    """The error of `got` (overwritten) against `wanted`, both fp32; where `wanted` is not finite it counts as 0."""
    sum_squares = float(torch.dot(got.sub_(wanted), got))
    if not _SQUARES_LOW < sum_squares < math.inf:  # too small or large for fp32, or NaN where wanted is not finite
        got.nan_to_num_(0.0, math.inf, -math.inf)
        if _range(got) == (0, 0):
            return BlockError()
        exact = got.double()
        sum_squares = float(torch.dot(exact, exact))
    low, high = _range(got.div_(wanted))
    if math.isnan(low):  # 0 / 0
        low, high = _range(got.nan_to_num_(0.0, math.inf, -math.inf))
    worst = max(-low, high)
    return BlockError(
        sum_squares=sum_squares,
        max_relative=worst,
        num_saturated=int(torch.isinf(got).sum()) if math.isinf(worst) else 0,
        num_flushed=int(got.eq_(-1).sum()) if worst >= 1 else 0,
    )


def _range(x: Tensor) -> tuple[float, float]:
    """Least and largest element, NaN if any is. Two reductions are vectorised on the CPU, `aminmax` is not."""
    return float(torch.amin(x)), float(torch.amax(x))
