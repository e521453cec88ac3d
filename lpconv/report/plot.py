"""What a plot of the HTML page is made of, and the geometry that plots share.

The template draws the plots as inline SVG, not matplotlib, for three reasons: their colours follow the page's light and
dark themes, every mark carries its tensor's name, and equal results give equal bytes. A plot is wide, over the tensors
of a model, or narrow: two of those stand side by side, and one fits a phone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lpconv.report.charts import FormatRange as FormatRange

T = TypeVar("T", int, float)

_WIDTH, _HEIGHT = 1000.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 986.0, 14.0, 330.0
NARROW = 490.0
CHARACTER = 7.0  # the width of one in a label, in page units
NUM_SHAPES = 6


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled place on an axis, with a line across the plot or without."""

    position: float
    label: str
    has_line: bool = True


@dataclass(frozen=True, kw_only=True)
class Text:
    """Words in a plot; `anchor` is SVG's: start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    kind: str = ""


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
    """One point, as an SVG path; `kind` holds its CSS classes, `title` is what the pointer and screen readers get.

    A title holds no figure that the page does not show.
    """

    kind: str
    path: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A finished plot. `description` tells in words what it shows; ticks of `x_ticks` have no lines.

    A mark of the legend is drawn around (7, 7) in a 14 by 14 box; its title is what it stands for.
    """

    name: str
    title: str
    description: str
    x_label: str = ""
    y_label: str = ""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    bands: tuple[Band, ...] = ()
    texts: tuple[Text, ...] = ()
    legend: tuple[Mark, ...] = ()
    dividers: tuple[float, ...] = ()
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM

    @property
    def is_wide(self) -> bool:
        """Whether it takes the whole page, and slides in its box on a phone."""
        return self.width > NARROW


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


def round_step(rough: float) -> float:
    """The smallest step not below `rough` that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough)


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
