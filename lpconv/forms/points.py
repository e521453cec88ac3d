"""Rows as sums of points (multipoint): value of a row = Σ_i scale_i · codes_i, with points within a bit budget.

`NAME_points` is the number of points of each row, `NAME_scale` has one fp32 scale per point, and all codes are [1,
points, bytes of a row]. Tensors that stay in 16 bits (embeddings, output heads) are `Scaled`.
"""

from __future__ import annotations  # tensors are named below and not imported

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import (
    BlockFacts,
    BlockStats,
    Component,
    EncodedBlock,
    FormSettings,
    Headers,
    Measurement,
    checked_ranges,
)
from lpconv.forms.form import Form, Over, Side, not_finite_error
from lpconv.forms.grid import is_positive
from lpconv.forms.scaled import SCALE_SUFFIX, ScaledCodes
from lpconv.mcf.point_layout import PointLayout, point_layout

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.mcf.multipoint import Points


_POINTS_SUFFIX = "_points"
_NARROW = 16  # formats with this many bits need no points
_IN_BYTES = {f.name: f for f in FORMATS.values() if f.storage_bits <= 8}


@dataclass(frozen=True, kw_only=True)
class PointRows(Form):
    """Rows as sums of points: `points_total` for the whole tensor, and at most `points_max` per row."""

    kind: ClassVar[str] = "points"
    suffixes: ClassVar[tuple[str, ...]] = (SCALE_SUFFIX, _POINTS_SUFFIX)
    holds_one_format: ClassVar[bool] = True
    encoded_per_second: ClassVar[float] = 6e6
    checked_per_second: ClassVar[float] = 5e5  # rows are fitted again

    format: Format
    points_total: int
    points_max: int = 1

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        if format.storage_bits >= _NARROW:
            return ScaledCodes.of(name, shape, format, settings)
        layout = _layout(shape, format, settings)
        assert layout is not None, "refused"
        return cls(
            name=name, shape=shape, format=format, points_total=layout.num_points, points_max=settings.points_max
        )

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        if format.storage_bits >= _NARROW or _layout(shape, format, settings) is not None:
            return None
        return f"{settings.budget_bits:g} bits are too few for rows of {shape[-1] if shape else 1} elements"

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        codes, counts = headers.root[name], headers.root.get(name + _POINTS_SUFFIX)
        fmt = _IN_BYTES.get(headers.exceptions.get(name, headers.format))
        if headers.quantised_by != cls.quantised_by or counts is None or fmt is None or len(codes.shape) != 3:
            return None
        _, total, row_bytes = codes.shape
        form = cls(name=name, shape=(*counts.shape, row_bytes * 8 // fmt.storage_bits), format=fmt, points_total=total)
        return form if all(map(headers.holds, form.components)) else None

    @property
    def words(self) -> str:
        return f"{self.format.name} codes, with one scale per row and point"

    @property
    def components(self) -> tuple[Component, ...]:
        total, codes = self.points_total, self.format.safetensors or "U8"
        return (
            Component(name=self.name + SCALE_SUFFIX, dtype="F32", shape=(total,)),
            Component(name=self.name + _POINTS_SUFFIX, dtype="U8", shape=self.shape[:-1]),
            Component(name=self.name, dtype=codes, shape=(1, total, self._row_bytes)),
        )

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def num_points(self) -> int | None:
        return self.points_total

    @property
    def _row_bytes(self) -> int:
        """Bytes of the codes of one point."""
        return self.cols * self.format.storage_bits // 8

    def is_valid_side(self, side: Side) -> bool:
        points = self._points(side)
        counts, scales = points.counts_R, points.scales_P
        return (
            int(counts.sum()) == self.points_total
            and not (counts.numel() and not int(counts.min()))
            and is_positive(scales)
        )

    def look(self, x: Tensor, start: int, work: Workspace) -> BlockFacts:
        """Fit the rows of a block. Raises InputError for NaN or Inf."""
        from lpconv.forms.blocks import as_float32, block_stats
        from lpconv.mcf import multipoint

        stats = block_stats(x, work)
        if not stats.is_finite:
            raise not_finite_error(self.name, self.format)
        fit = multipoint.fit(as_float32(x, work).view(-1, self.cols), self.format, self.points_max)
        return BlockFacts(stats=stats, more=fit)

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        """Distribute the points, and return scales and counts."""
        from lpconv.mcf import multipoint

        points = multipoint.PointFit.concatenate([each.more for each in looked]).allot(self.points_total)
        side = {
            self.name + SCALE_SUFFIX: points.scales_P,
            self.name + _POINTS_SUFFIX: points.counts_R.view(self.shape[:-1]),
        }
        return Measurement(stats=sum((each.stats for each in looked), BlockStats()), side=side)

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        from lpconv.forms.blocks import as_float32, block_error
        from lpconv.mcf import multipoint

        points = self._points_of(start, start + x.numel(), measured.side)
        value = as_float32(x, work)
        coded = multipoint.encode(value.view(-1, self.cols), points, self.format)
        got = multipoint.decode(coded, points, self.format)
        return EncodedBlock(data=(coded.view(-1),), error=block_error(value, got.view(-1)))

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        counts = self._points(side).counts_R
        first = int(counts[: start // self.cols].sum())
        last = first + int(counts[start // self.cols : stop // self.cols].sum())
        return first * self._row_bytes, last * self._row_bytes

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        import torch

        from lpconv.mcf import multipoint

        coded = data[0].view(torch.uint8).view(-1, self._row_bytes)
        return multipoint.decode(coded, self._points_of(start, stop, side), self.format).view(-1)

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        parts = checked_ranges(value.numel(), self.cols)
        return all(self._is_sum(value[a:b], got[a:b], start + a, side) for a, b in parts)

    def _is_sum(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        """Whether rows are sums of points with the stored scales, by reference rounding; zeros may lose their sign."""
        import torch

        from lpconv.formats.cast import cast
        from lpconv.forms.blocks import same_numbers

        points = self._points_of(start, start + value.numel(), side)
        rest = value.view(-1, self.cols)
        total = torch.full_like(rest, -0.0)  # -0 + x is x, with its sign
        for k in range(int(points.counts_R.max())):
            has_point = (points.counts_R > k)[:, None]
            at = (points.first_R + k).clamp_max(points.scales_P.numel() - 1)
            scale = points.scales_P[at][:, None]
            part = cast(rest / scale, self.format) * scale
            total, rest = torch.where(has_point, total + part, total), rest - part
        return same_numbers(got + 0.0, total.view(-1) + 0.0)  # -0 + 0 is 0

    def _points(self, side: Side) -> Points:
        from lpconv.mcf.multipoint import Points

        return Points(counts_R=side[self.name + _POINTS_SUFFIX].view(-1), scales_P=side[self.name + SCALE_SUFFIX])

    def _points_of(self, start: int, stop: int, side: Side) -> Points:
        """The points of the rows of a block."""
        return self._points(side).rows(start // self.cols, stop // self.cols)


def _layout(shape: tuple[int, ...], format: Format, settings: FormSettings) -> PointLayout | None:
    return point_layout(shape, format, budget_bits=settings.budget_bits, points_max=settings.points_max)
