"""Lines over the steps of a run, as the plot that the templates draw."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lpconv.report.plot import Axis, LegendEntry, Mark, Plot, Tick, column_x
from lpconv.results import Series

__all__ = ["Line", "line_plot"]

_TICKS = 5
_MAX_DIGITS = 4  # after the point


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series, its colour, and its words in the legend; without words it shares those of another."""

    series: Series
    colour: int
    label: str = ""


def line_plot(name: str, title: str, description: str, lines: Sequence[Line]) -> Plot | None:
    """The finite points of the lines over a common axis, which the title names; None where there are none."""
    points = [(s, v) for line in lines for s, v in zip(line.series.steps, line.series.values, strict=True)]
    points = [(s, v) for s, v in points if math.isfinite(v)]
    if not points:
        return None
    low, high = min(v for _, v in points), max(v for _, v in points)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    axis = Axis(low=low - room, high=high + room)
    last = max(s for s, _ in points)
    return Plot(
        name=name,
        title=title,
        description=description,
        y_label="",
        x_ticks=tuple(Tick(position=column_x(s, last + 1), label=str(s)) for s in _step_ticks(last)),
        y_ticks=tuple(Tick(position=axis.y(v), label=label) for v, label in _value_ticks(axis)),
        bands=(),
        marks=tuple(
            Mark(kind=f"line series-{line.colour}", path=_path(line.series, axis, last), title=line.label)
            for line in lines
        ),
        legend=tuple(
            LegendEntry(kind=f"line series-{line.colour}", path="M1 7H13", label=line.label)
            for line in lines
            if line.label
        ),
        dividers=(),
    )


def _path(series: Series, axis: Axis, last: int) -> str:
    """Segments between finite points; a gap where a value is not finite."""
    path, pen = "", "M"
    for step, value in zip(series.steps, series.values, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        path += f"{pen}{column_x(step, last + 1)} {axis.y(value)}"
        pen = "L"
    return path


def _step_ticks(last: int) -> list[int]:
    step = max(1, round(last / _TICKS))
    return list(range(0, last + 1, step))


def _value_ticks(axis: Axis) -> list[tuple[float, str]]:
    """Round numbers, multiples of 1, 2 or 5 times a power of ten, with as many digits as tell them apart."""
    rough = (axis.high - axis.low) / _TICKS
    exponent = math.floor(math.log10(rough))
    step = next(m * 10.0**exponent for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough)
    numbers = range(math.ceil(axis.low / step), math.floor(axis.high / step) + 1)
    digits = max(0, -exponent)
    return [(n * step, f"{n * step:.{digits}f}" if digits <= _MAX_DIGITS else f"{n * step:.1e}") for n in numbers]
