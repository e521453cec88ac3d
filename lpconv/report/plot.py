"""What a plot of the HTML page is made of, the geometry that all plots share, and lines over the steps of a run.

The template draws the plots as inline SVG, not matplotlib, for three reasons: their colours follow the page's light and
dark themes, every mark carries its tensor's name and figures, and equal results give equal bytes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lpconv.results import Series

__all__ = [
    "CHARACTER",
    "NUM_SHAPES",
    "Axis",
    "Band",
    "FormatRange",
    "Line",
    "Mark",
    "Plot",
    "Tick",
    "column_x",
    "dash_path",
    "line_plot",
    "mark_path",
    "mark_radius",
]

T = TypeVar("T", int, float)

_WIDTH, _HEIGHT = 1000.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 986.0, 14.0, 330.0
CHARACTER = 7.0  # the width of one in a label, in page units
NUM_SHAPES = 6
_TICKS = 5
_MAX_DIGITS = 4  # after the point


@dataclass(frozen=True, kw_only=True)
class FormatRange:
    """What a number format can hold: its largest, smallest normal and smallest positive number."""

    max: float
    min_normal: float
    min_subnormal: float


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled place on an axis."""

    position: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Band:
    """A shaded rectangle; `kind` is its CSS class, `label` is written into it where there is room."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One point, as an SVG path; `kind` holds its CSS classes, `title` is what the pointer and screen readers get."""

    kind: str
    path: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A finished plot. `description` tells in words what it shows.

    A mark of the legend is drawn around (7, 7) in a 14 by 14 box; its title is what it stands for.
    """

    name: str
    title: str
    description: str
    y_label: str = ""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    bands: tuple[Band, ...] = ()
    legend: tuple[Mark, ...] = ()
    dividers: tuple[float, ...] = ()
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear map from values (exponents, decibels) to the page's y, or from `start` to `end` of its x.

    Values beyond its ends lie on them. The larger the value, the smaller y.
    """

    low: float
    high: float
    start: float = _BOTTOM
    end: float = _TOP

    def at(self, value: float) -> float:
        """The place of a value on the page."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, step: T, text: Callable[[T], str]) -> tuple[Tick, ...]:
        """A tick at every multiple of `step`."""
        multiples = (n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1))
        return tuple(Tick(position=self.at(value), label=text(value)) for value in multiples)


def column_x(position: float, count: int) -> float:
    """The page's x at `position` of `count` equal columns: 0 is the left edge of the first, 0.5 its middle."""
    return round(_LEFT + position * (_RIGHT - _LEFT) / count, 1)


def mark_radius(count: int) -> float:
    """A radius that leaves `count` marks apart, within what the eye can see."""
    return round(min(max(0.4 * (_RIGHT - _LEFT) / count, 2.2), 4.5), 1)


def mark_path(series: int, x: float, y: float, r: float) -> str:
    """The path of one mark. Series differ in shape, so that they can be told apart without colour."""
    d = 2 * r
    shapes = (
        f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {d:.1f} 0a{r} {r} 0 1 0 {-d:.1f} 0z",  # circle
        f"M{x - r:.1f} {y - r:.1f}h{d:.1f}v{d:.1f}h{-d:.1f}z",  # square
        f"M{x:.1f} {y - r:.1f}l{r:.1f} {d:.1f}h{-d:.1f}z",  # triangle
        f"M{x:.1f} {y - r:.1f}l{r:.1f} {r:.1f}l{-r:.1f} {r:.1f}l{-r:.1f} {-r:.1f}z",  # diamond
        f"M{x - r:.1f} {y - r:.1f}h{d:.1f}l{-r:.1f} {d:.1f}z",  # triangle on its tip
        f"M{x - r:.1f} {y - r / 2:.1f}h{d:.1f}v{r:.1f}h{-d:.1f}z",  # bar
    )
    return shapes[series % NUM_SHAPES]


def dash_path(x: float, y: float, r: float) -> str:
    """The path of a short horizontal line."""
    return f"M{x - r:.1f} {y:.1f}h{2 * r:.1f}"


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
        x_ticks=tuple(Tick(position=column_x(s, last + 1), label=str(s)) for s in _step_ticks(last)),
        y_ticks=_value_ticks(axis),
        marks=tuple(
            Mark(kind=f"line series-{line.colour}", path=_path(line.series, axis, last), title=line.label)
            for line in lines
        ),
        legend=tuple(
            Mark(kind=f"line series-{line.colour}", path="M1 7H13", title=line.label) for line in lines if line.label
        ),
    )


def _path(series: Series, axis: Axis, last: int) -> str:
    """Segments between finite points; a gap where a value is not finite."""
    path, pen = "", "M"
    for step, value in zip(series.steps, series.values, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        path += f"{pen}{column_x(step, last + 1)} {axis.at(value)}"
        pen = "L"
    return path


def _step_ticks(last: int) -> list[int]:
    return list(range(0, last + 1, max(1, round(last / _TICKS))))


def _value_ticks(axis: Axis) -> tuple[Tick, ...]:
    """Round numbers, multiples of 1, 2 or 5 times a power of ten, with as many digits as tell them apart."""
    rough = (axis.high - axis.low) / _TICKS
    exponent = math.floor(math.log10(rough))
    step = next(m * 10.0**exponent for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough)
    form = f".{max(0, -exponent)}f" if -exponent <= _MAX_DIGITS else ".1e"
    return axis.ticks(step, lambda value: format(value, form))
