"""Multipoint quantisation: each row of a matrix as a short sum of low-bit rows, each with its own scale.

Liu, Ye, Zhou & Liu 2020 (arXiv 2002.09049, Algorithm 1): x ≈ Σ_i a_i w_i, where every w_i is a row of numbers of a
format and a_i an fp32 scale. Point i is fitted to the residual of the points before it, r_{i+1} = r_i - a_i w_i. A
format with few exponents needs a scale for every residual; with all scales 1 this is a multi-component float.

w_i is always r_i / a_i rounded to nearest. So a point is plain rounding at its scale, and codes follow from the scales
alone and can be checked against them. Departures from the paper:

- Only a row's last point uses the scale with the smallest residual. That scale clips, and the next point would have to
  represent the clipped part next to a residual that is otherwise small. The points before the last map the row's
  largest magnitude to the format's largest number instead. For Gaussian rows of two int4 points that gives 41 dB
  instead of 33.
- Extra points go to the rows where they remove most of the weights' squared error within a budget of bits. The paper
  assigns them by the error of outputs on calibration data, which a conversion does not have.

Legend: R rows, C columns, N maximum points per row, P total points.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.formats import codes
from lpconv.formats.codes import nearest_
from lpconv.formats.spec import Format

# Scales to try, as multiples of the widest. Larger ones leave the top of the range unused, which suits gridded rows.
_FACTORS = tuple(2.0 ** (k / 4) for k in (2, 1, *range(-1, -11, -1)))
_REFINEMENTS = 4
_MIN_SCALE = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class Points:
    """Scales of a matrix: `counts_R` (uint8) is the number of points per row, `scales_P` the scales in row order."""

    counts_R: Tensor
    scales_P: Tensor

    @property
    def first_R(self) -> Tensor:
        """The index of each row's first point."""
        counts = self.counts_R.long()
        return counts.cumsum(0) - counts

    def rows(self, start: int, stop: int) -> "Points":
        """The points of rows `start` to `stop`."""
        first, last = int(self.counts_R[:start].sum()), int(self.counts_R[:stop].sum())
        return Points(counts_R=self.counts_R[start:stop], scales_P=self.scales_P[first:last])


@dataclass(frozen=True, kw_only=True)
class PointFit:
    """Scales for 1 to N points of every row, and the remaining errors.

    `scales_RNN[r, n]` (float32) begins with the n + 1 scales of row r with n + 1 points; `errors_RN[r, n]` (float64) is
    Σ(x - x̂)² with them, and decreases with n.
    """

    scales_RNN: Tensor
    errors_RN: Tensor

    @classmethod
    def concatenate(cls, fits: Sequence["PointFit"]) -> "PointFit":
        """Concatenate the fits of consecutive blocks of rows."""
        return cls(scales_RNN=torch.cat([f.scales_RNN for f in fits]), errors_RN=torch.cat([f.errors_RN for f in fits]))

    def allot(self, num_points: int) -> Points:
        """Distribute `num_points`: one per row, the others where they remove most error. All points cost the same bits.

        Ties go to the first row.
        """
        rows, most = self.errors_RN.shape
        # Points of a row are taken in order, so no gain may exceed the one before it.
        gains = (-self.errors_RN.diff(dim=1)).cummin(dim=1).values
        taken = gains.flatten().argsort(descending=True, stable=True)[: num_points - rows]
        counts = 1 + torch.bincount(taken // max(most - 1, 1), minlength=rows)
        scales_RN = self.scales_RNN[torch.arange(rows), counts - 1]
        return Points(counts_R=counts.to(torch.uint8), scales_P=scales_RN[torch.arange(most) < counts[:, None]])


def fit(x_RC: Tensor, element: Format, points: int) -> PointFit:
    """Return scales for 1 to `points` points of every row of `x_RC` (finite float32), and the remaining errors."""
    rows = x_RC.shape[0]
    scales = torch.ones(rows, points, points)
    errors = torch.empty(rows, points, dtype=torch.float64)
    wide_scales = torch.ones(rows, points)
    wide = left = x_RC  # residuals with the widest scales, and with the scales of the table
    for n in range(points):
        scales[:, n, :n] = wide_scales[:, :n]
        scales[:, n, n] = _best_scale(wide, element)
        residual = _residual(wide, scales[:, n, n], element)
        errors[:, n] = _squared_norms(residual.double())
        if n:
            worse = errors[:, n] >= errors[:, n - 1]
            scales[worse, n, :n] = scales[worse, n - 1, :n]
            scales[worse, n, n] = _best_scale(left[worse], element)
            residual[worse] = _residual(left[worse], scales[worse, n, n], element)
            errors[worse, n] = _squared_norms(residual[worse].double())
        wide_scales[:, n] = _widest_scale(wide, element)
        wide, left = _residual(wide, wide_scales[:, n], element), residual
    return PointFit(scales_RNN=scales, errors_RN=errors)


def encode(x_RC: Tensor, points: Points, element: Format) -> Tensor:
    """Return the codes of every point as bytes [P, ...], packed as in `lpconv.formats.codes`."""
    shape = codes.code_shape(element, (points.scales_P.numel(), x_RC.shape[1]))
    coded = torch.empty(shape, dtype=torch.uint8)
    rest = x_RC
    for keep, indices in _points_in_turn(points):
        rest, scale = rest[keep], points.scales_P[indices]
        coded[indices] = codes.encode(rest / scale[:, None], element).view(torch.uint8)
        rest = _residual(rest, scale, element)
    return coded


def decode(coded: Tensor, points: Points, element: Format) -> Tensor:
    """Return the float32 values [R, C] of bytes from `encode`: Σ a_i w_i, summed in the order of the points."""
    (_, indices), *others = _points_in_turn(points)
    values = _scaled_numbers(coded, points, indices, element)
    rows = torch.arange(indices.numel())
    for keep, indices in others:
        rows = rows[keep]
        values[rows] += _scaled_numbers(coded, points, indices, element)
    return values


def _scaled_numbers(coded: Tensor, points: Points, indices: Tensor, element: Format) -> Tensor:
    return codes.decode(coded[indices], element) * points.scales_P[indices][:, None]


def _points_in_turn(points: Points) -> list[tuple[Tensor, Tensor]]:
    """For each k: a mask of the rows with a k-th point among those with k - 1, and the points' indices."""
    turns = []
    counts, first = points.counts_R, points.first_R
    for k in range(int(counts.max())):
        keep = counts > k
        counts, first = counts[keep], first[keep]
        turns.append((keep, first + k))
    return turns


def _widest_scale(x_RC: Tensor, element: Format) -> Tensor:
    """The scale of each row that maps its largest magnitude to the format's largest number; 1 for rows of zeros."""
    scale = torch.maximum(x_RC.amax(1), -x_RC.amin(1)) / element.max
    most = torch.finfo(torch.float32).max / element.max * (1 - 2.0**-23)  # times `element.max` it does not overflow
    return torch.where(scale == 0, 1.0, scale.clamp(_MIN_SCALE, most))


def _best_scale(x_RC: Tensor, element: Format) -> Tensor:
    """The scale of each row with the smallest residual, or nearly; never worse than the widest.

    Least squares gives the best scale for given numbers, and rounding gives the best numbers for a given scale, so
    alternating lowers the error until both agree.
    """
    if x_RC.shape[0] == 0:
        return x_RC.new_empty(0)
    widest = _widest_scale(x_RC, element)
    scale, error = widest, _squared_norms(_residual(x_RC, widest, element))
    for factor in _FACTORS:
        scale, error = _choose_better(x_RC, scale, error, widest * factor, element)
    for _ in range(_REFINEMENTS):
        numbers = nearest_(x_RC / scale[:, None], element)
        fitted = (x_RC * numbers).sum(1) / numbers.square().sum(1)
        scale, error = _choose_better(x_RC, scale, error, fitted, element)
    return scale


def _choose_better(x_RC: Tensor, scale: Tensor, error: Tensor, other: Tensor, element: Format) -> tuple[Tensor, Tensor]:
    """The better of two scales for each row, with its error; 0 and NaN are not valid scales."""
    other = torch.where(other >= _MIN_SCALE, other, scale)
    other_error = _squared_norms(_residual(x_RC, other, element))
    is_better = other_error < error
    return torch.where(is_better, other, scale), torch.where(is_better, other_error, error)


def _squared_norms(x_RC: Tensor) -> Tensor:
    return x_RC.square().sum(1)


def _residual(x_RC: Tensor, scale: Tensor, element: Format) -> Tensor:
    """x - scale · round(x / scale)."""
    return x_RC - nearest_(x_RC / scale[:, None], element).mul_(scale[:, None])
