"""Exponent histograms that are independent of the format, with exact counts of what any format would do to the tensor.

One bin per power of two cannot give exact rates: whether a format flushes an element, makes it subnormal or overflows
is decided at ties between its numbers. With m mantissa bits and rounding to nearest even, |x| is

    flushed to zero   up to and including min_subnormal / 2, a power of two
    subnormal         from there to below (2 - 2^-m) · 2^(min_exponent - 1), a tie that goes up to 2^min_exponent
    beyond the range  from half a step above the largest number; the tie goes up unless that number is even (448)

and a power-of-two scale only shifts the exponent. So each binade is cut at the sixteenths, each with a bin of its own
apart from the open interval above it, and the last interval at 2 - 2^-5 ... 2 - 2^-11: 39 bins whose edges include
every edge of every format of up to 10 mantissa bits. One histogram can therefore answer "what if e5m2, at loss scale
2^7?" for any format and scale. The signal-to-noise ratio is an estimate: it assumes that values are evenly spread
within a bin.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.cast import cast
from lpconv.formats.spec import Format, get_format

BINS = 39  # per binade: 16 exact sixteenths and 16 open intervals, the last of which is cut into 8
_SAMPLES = 37
_EXPONENTS, _COUNTS = 2048, 2**62  # limits of a record: more than float64's exponents, fewer than int64 can count
_EDGES = [1 + i / 16 for i in range(16)] + [2 - 2.0**-j for j in range(5, 12)]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Effects of a cast to a format, as fractions of the tensor's finite non-zero elements.

    `sqnr_db` is an estimate (10 · log10 of signal power over error power), NaN if there is no signal and +Inf if there
    is no error; saturated elements count with their distance to the largest number.
    """

    underflow: float
    subnormal: float
    overflow: float
    sqnr_db: float


@dataclass(frozen=True, kw_only=True)
class ExponentHistogram:
    """Counts of a tensor's elements by exponent, made in one pass; histograms of several steps can be added.

    `counts[i, b]`, of shape (binades, BINS), counts the elements of exponent `first_exponent + i` in bin b. Zeros,
    infinities and NaN are counted separately.
    """

    counts: Tensor
    first_exponent: int
    num_zero: int = 0
    num_inf: int = 0
    num_nan: int = 0

    @property
    def num_nonzero(self) -> int:
        """Number of finite non-zero elements."""
        return int(self.counts.sum())

    @property
    def num_elements(self) -> int:
        """Number of elements, including zeros, infinities and NaN."""
        return self.num_nonzero + self.num_zero + self.num_inf + self.num_nan

    @property
    def exponents(self) -> dict[int, int]:
        """Number of elements for each floor(log2|x|), lowest first, for charts."""
        totals = self.counts.sum(1).tolist()
        return {self.first_exponent + i: n for i, n in enumerate(totals) if n}

    def __add__(self, other: "ExponentHistogram") -> "ExponentHistogram":
        parts = [h for h in (self, other) if len(h.counts)]
        first = min((h.first_exponent for h in parts), default=0)
        last = max((h.first_exponent + len(h.counts) for h in parts), default=0)
        counts = torch.zeros(last - first, BINS, dtype=torch.int64)
        for h in parts:
            counts[h.first_exponent - first : h.first_exponent - first + len(h.counts)] += h.counts
        return ExponentHistogram(
            counts=counts,
            first_exponent=first,
            num_zero=self.num_zero + other.num_zero,
            num_inf=self.num_inf + other.num_inf,
            num_nan=self.num_nan + other.num_nan,
        )

    def num_underflow(self, format: str | Format, *, log2_scale: int = 0) -> int:
        """Number of non-zero elements that become zero in `format` after multiplication by 2^log2_scale."""
        spec = _supported(format)
        return self._below(spec.min_exponent - spec.mantissa_bits - 1 - log2_scale, 1.0, inclusive=True)

    def num_subnormal(self, format: str | Format, *, log2_scale: int = 0) -> int:
        """Number of elements that become subnormal in `format` after multiplication by 2^log2_scale."""
        spec = _supported(format)
        edge = 2 - spec.eps
        below_normal = self._below(spec.min_exponent - 1 - log2_scale, edge, inclusive=False)
        return max(below_normal - self.num_underflow(spec, log2_scale=log2_scale), 0)  # int2 has none

    def num_overflow(self, format: str | Format, *, log2_scale: int = 0) -> int:
        """Number of finite elements beyond the largest number of `format` after multiplication by 2^log2_scale."""
        spec = _supported(format)
        edge = 1 + (spec.max_mantissa + 0.5) * spec.eps
        even = (spec.max_exponent_field << spec.mantissa_bits) + spec.max_mantissa & 1 == 0  # then the tie rounds down
        return self.num_nonzero - self._below(spec.max_exponent - log2_scale, edge, inclusive=even)

    def rates(self, format: str | Format, *, log2_scale: int = 0) -> Rates:
        """All rates of a cast to `format`; 0 for an empty or all-zero tensor."""
        total = max(self.num_nonzero, 1)
        return Rates(
            underflow=self.num_underflow(format, log2_scale=log2_scale) / total,
            subnormal=self.num_subnormal(format, log2_scale=log2_scale) / total,
            overflow=self.num_overflow(format, log2_scale=log2_scale) / total,
            sqnr_db=self.sqnr_db(format, log2_scale=log2_scale),
        )

    def sqnr_db(self, format: str | Format, *, log2_scale: int = 0) -> float:
        """Estimated signal-to-noise ratio of a cast to `format` in decibels, with values evenly spread in bins."""
        signal, noise = self._powers(_supported(format), log2_scale)
        if self.num_nonzero == 0:
            return math.nan
        return 10 * math.log10(signal / noise) if noise > 0 else math.inf

    @property
    def log2_rms(self) -> int:
        """floor(log2) of the root mean square; 0 if there are no finite non-zero elements."""
        signal = self._powers(get_format("bf16"), 0)[0]
        return math.floor(math.log2(signal / (self.num_nonzero + self.num_zero)) / 2) if signal else 0

    @property
    def crest(self) -> float:
        """Largest magnitude over the root mean square, to the width of a bin; NaN without finite non-zero elements."""
        if self.num_nonzero == 0:
            return math.nan
        top = int(self.counts.any(1).nonzero()[-1])
        edges = _sample_points()[int(self.counts[top].nonzero()[-1])]
        square = math.ldexp(float(edges[-1]), self.first_exponent + top) ** 2
        signal = self._powers(get_format("bf16"), 0)[0]
        return math.sqrt(square * (self.num_nonzero + self.num_zero) / signal)

    def _powers(self, spec: Format, log2_scale: int) -> tuple[float, float]:
        """Sums over all elements of x² and of the squared error."""
        if self.num_nonzero == 0:
            return 0.0, 0.0
        first = self.first_exponent + log2_scale
        powers = torch.stack([_bin_powers(spec, first + i) for i in range(len(self.counts))])  # (binades, 2, BINS)
        signal, noise = (self.counts.double()[:, None] * powers).sum((0, 2)).tolist()
        return signal, noise

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict without empty bins."""
        rows = {
            str(self.first_exponent + i): {str(b): n for b, n in enumerate(row) if n}
            for i, row in enumerate(self.counts.tolist())
            if any(row)
        }
        return {"counts": rows, "zero": self.num_zero, "inf": self.num_inf, "nan": self.num_nan}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "ExponentHistogram":
        """The inverse of `to_dict`. Raises UsageError for an invalid record."""
        try:
            rows = {_parse_integer(e, -_EXPONENTS, _EXPONENTS): row for e, row in record["counts"].items()}
            first = min(rows, default=0)
            counts = torch.zeros(max(rows, default=-1) + 1 - first, BINS, dtype=torch.int64)
            for exponent, row in rows.items():
                for position, number in row.items():
                    counts[exponent - first, _parse_integer(position, 0, BINS - 1)] = _parse_integer(number, 0, _COUNTS)
            zero, inf, nan = (_parse_integer(record[key], 0, _COUNTS) for key in ("zero", "inf", "nan"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(
                "this is not the record of an exponent histogram", hint="write it with `to_dict`"
            ) from error
        return cls(counts=counts, first_exponent=first, num_zero=zero, num_inf=inf, num_nan=nan)

    def _below(self, exponent: int, edge: float, *, inclusive: bool) -> int:
        """Number of non-zero elements with |x| < edge · 2^exponent (<= if `inclusive`), for an edge in [1, 2)."""
        row = exponent - self.first_exponent
        if row < 0:
            return 0
        if row >= len(self.counts):
            return self.num_nonzero
        return int(self.counts[:row].sum()) + int(self.counts[row, : _bins_below(edge, inclusive=inclusive)].sum())


def exponent_histogram_reference(x: Tensor) -> ExponentHistogram:
    """The histogram of a tensor of any floating dtype, computed in float64: the reference for the fast one."""
    values = x.detach().double().abs().reshape(-1)
    finite = values[values.isfinite() & (values > 0)]
    half, exponent = torch.frexp(finite)
    first, last = (int(exponent.min()) - 1, int(exponent.max()) - 1) if finite.numel() else (0, -1)
    flat = (exponent.long() - 1 - first) * BINS + bin_of(2 * half)
    counts = torch.bincount(flat, minlength=(last + 1 - first) * BINS)
    return ExponentHistogram(
        counts=counts.view(-1, BINS).cpu(),
        first_exponent=first,
        num_zero=int((values == 0).sum()),
        num_inf=int(values.isinf().sum()),
        num_nan=int(values.isnan().sum()),
    )


def _parse_integer(value: Any, least: int, most: int) -> int:
    """Parse an integer from a number or a key of a record. Raises ValueError if it is out of bounds."""
    number = int(value)
    if number not in range(least, most + 1) or (isinstance(value, float) and value != number):
        raise ValueError(f"{value} is not an integer between {least} and {most}")
    return number


def bin_of(significand: Tensor) -> Tensor:
    """Bin of each significand in [1, 2): 2i at exactly 1 + i/16, 2i + 1 above it.

    From bin 31 on, the edges are 2 - 2^-5, 2 - 2^-6, ...
    """
    sixteenths = (significand - 1) * 16
    fine = torch.tensor(_EDGES[16:], dtype=significand.dtype, device=significand.device)
    beyond = torch.bucketize(significand, fine, right=True)
    return (sixteenths.floor() + sixteenths.ceil()).long() + beyond


def _bins_below(edge: float, *, inclusive: bool) -> int:
    """Number of bins of a binade below `edge`, or up to `edge` if `inclusive`."""
    sixteenth = (edge - 1) * 16
    if sixteenth.is_integer():
        return 2 * int(sixteenth) + int(inclusive)
    return 31 + _EDGES.index(edge) - 15


@cache
def _sample_points() -> Tensor:
    """Representative significands of each bin: midpoints of equal parts of an interval, or the exact point.

    The number of parts is odd so that no midpoint is a number of a format: the midpoints of 32 parts of a sixteenth are
    fp16 numbers, and their rounding error would be zero.
    """
    edges = [*_EDGES, 2.0]
    middles = (torch.arange(_SAMPLES, dtype=torch.float64) + 0.5) / _SAMPLES
    intervals = [low + (high - low) * middles for low, high in itertools.pairwise(edges)]
    rows = []
    for i, interval in enumerate(intervals):
        if i < 16:
            rows.append(torch.full_like(middles, edges[i]))
        rows.append(interval)
    return torch.stack(rows)


@cache
def _bin_powers(spec: Format, exponent: int) -> Tensor:
    """Mean powers in each bin of a binade, shape (2, BINS): x² and squared error."""
    x = _sample_points() * math.ldexp(1.0, exponent)
    return torch.stack([v.square().mean(-1) for v in (x, cast(x, spec) - x)])


def _supported(format: str | Format) -> Format:
    spec = get_format(format)
    edge = 1 + (spec.max_mantissa + 0.5) * spec.eps
    exact = ((edge - 1) * 16).is_integer() or (edge in _EDGES and spec.max_mantissa % 2 == 1)
    if not (spec.has_sign and spec.has_zero and spec.mantissa_bits <= 10 and exact):
        raise UnsupportedError(
            f"exponent histograms are too coarse for {spec.name}",
            hint="use a signed format with at most 10 mantissa bits",
        )
    return spec
