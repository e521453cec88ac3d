"""What a plot of the HTML page is made of, and the geometry that all plots share. A template draws it as inline SVG.

The template draws the plots, not matplotlib, for three reasons: their colours follow the page's light and dark themes,
every mark carries its tensor's name and figures, and equal results give equal bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lpconv.report.convert.grouping import modules_of
from lpconv.results import TensorRecord

__all__ = [
    "CHARACTER",
    "NUM_SHAPES",
    "Axis",
    "Band",
    "LegendEntry",
    "Mark",
    "Plot",
    "Tick",
    "column_x",
    "dash_path",
    "mark_path",
    "mark_radius",
    "module_dividers",
    "module_ticks",
]

_WIDTH, _HEIGHT = 1000.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 986.0, 14.0, 330.0
# Widths of a label's character and of the gap that keeps labels apart, in page units.
CHARACTER = 7.0
_LABEL_GAP = 10.0
NUM_SHAPES = 6


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
class LegendEntry:
    """A mark of the plot and what it stands for. The path is drawn around (7, 7) in a 14 by 14 box."""

    kind: str
    path: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A finished plot. `description` tells in words what it shows."""

    name: str
    title: str
    description: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    bands: tuple[Band, ...]
    marks: tuple[Mark, ...]
    legend: tuple[LegendEntry, ...]
    dividers: tuple[float, ...]
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear map from values (exponents, decibels) to the page's y. Values beyond its ends lie on them."""

    low: float
    high: float

    def y(self, value: float) -> float:
        """The page's y of a value; the larger the value, the smaller y."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_BOTTOM - share * (_BOTTOM - _TOP), 1)


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


def module_ticks(tensors: Sequence[TensorRecord]) -> tuple[Tick, ...]:
    """A label in the middle of each module's columns: layer numbers first, then the names that still find room."""
    ticks: list[Tick] = []
    taken: list[tuple[float, float]] = []
    for module, first, last in sorted(_module_columns(tensors), key=lambda m: not _is_number(m[0])):
        label = module.rpartition(".")[2]
        half = len(label) * CHARACTER / 2
        centre = column_x((first + last) / 2, len(tensors))
        centre = min(max(centre, _LEFT + half), _RIGHT - half)
        if all(centre + half + _LABEL_GAP <= start or centre - half - _LABEL_GAP >= end for start, end in taken):
            ticks.append(Tick(position=round(centre, 1), label=label))
            taken.append((centre - half, centre + half))
    return tuple(ticks)


def _is_number(module: str) -> bool:
    return module.rpartition(".")[2].isdecimal()


def module_dividers(tensors: Sequence[TensorRecord]) -> tuple[float, ...]:
    """The places between neighbouring modules."""
    return tuple(column_x(first, len(tensors)) for _, first, _ in _module_columns(tensors) if first > 0)


def _module_columns(tensors: Sequence[TensorRecord]) -> list[tuple[str, int, int]]:
    """Each run of tensors of one module: its name, its first column and the one after its last."""
    modules = modules_of([t.name for t in tensors])
    runs = groupby(range(len(tensors)), key=lambda i: modules[tensors[i].name])
    places = [(module, list(columns)) for module, columns in runs]
    return [(module, columns[0], columns[-1] + 1) for module, columns in places]
