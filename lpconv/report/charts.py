"""Charts as data: marks, boxes and labels in data units. `drawing` computes their positions on a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lpconv.results import Series

# Series have different shapes, so that they can be told apart without colour.
SYMBOLS = ("circle", "square", "triangle", "diamond", "tip", "bar")
HEAT_WORDS = (
    "Percentage of elements that become zero (orange) or, with an arrow, exceed the range (red). A cell without a "
    "number loses less than 0.5 %, a grey cell nothing."
)
_TICKS = 5
_MAX_DIGITS = 4  # digits after the point
_FLAT = 1e-5  # relative range below which values count as constant plus noise
_MAX_NAME = 40
_MAX_VALUE = 1e100  # that an axis reaches, so that no difference of two values is infinite


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled value on an axis, optionally with a grid line."""

    at: float
    label: str
    has_line: bool = True


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`. Values beyond are drawn at the ends; of colliding tick labels the first is kept."""

    low: float
    high: float
    label: str = ""
    ticks: tuple[Tick, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Points with a colour and a shape: a symbol or "dash" at each, or one "line", "area" or "whisker" through all.

    `kind` are CSS classes. `title` is for tooltips and screen readers, and contains no number that the page lacks. A
    mark in a legend has no points, and its title is the label.
    """

    kind: str
    shape: str
    title: str = ""
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Box:
    """A filled rectangle in data coordinates, with a label if it fits."""

    kind: str
    x: tuple[float, float]
    y: tuple[float, float]
    label: str = ""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart, with a text alternative in `description` for readers who cannot see it.

    `rows` are (name, value) of the rows of a bar chart; row i is between i and i + 1 on the y axis, downwards.
    `labels` are (x, y, text next to that point), `dividers` x values between groups. A wide chart has a column for each
    tensor of a model.
    """

    title: str
    description: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...] = ()
    boxes: tuple[Box, ...] = ()
    labels: tuple[tuple[float, float, str], ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    legend: tuple[Mark, ...] = ()
    dividers: tuple[float, ...] = ()
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Shares of elements that one layer loses in one column of a heat map."""

    layer: str
    block: str
    column: str
    underflow: float
    overflow: float
    title: str


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Losses by layer (rows) and block of columns. Layers are in the order of the losses."""

    title: str
    description: str
    blocks: tuple[str, ...]
    columns: tuple[str, ...]
    losses: tuple[Loss, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart. Without a label it shares the legend entry of another line; `error` adds a band around it."""

    series: Series
    colour: int
    label: str = ""
    is_dashed: bool = False
    error: float = 0.0

    @property
    def kind(self) -> str:
        """The CSS classes of the line."""
        return f"line {series_kind(self.colour)}" + (" dashed" if self.is_dashed else "")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A named bar with its value as text: stacked lengths from zero, or one value with an interval."""

    name: str
    text: str
    lengths: tuple[float, ...]
    interval: tuple[float, float] | None = None


def series_kind(index: int) -> str:
    """The CSS class of a series."""
    return f"series-{index % len(SYMBOLS)}"


def line_chart(title: str, description: str, lines: Sequence[Line], *, over: str = "step") -> Chart | None:
    """A chart of lines over training steps or layers; None if no point is finite. The title names the y axis."""
    ends = [(s, v + e) for line in lines for s, v in _finite(line.series) for e in (-line.error, line.error)]
    values = [(s, v) for s, v in ends if abs(v) <= _MAX_VALUE]
    if not values:
        return None
    low, high, last = min(v for _, v in values), max(v for _, v in values), max(s for s, _ in values)
    level = max(abs(low), abs(high))
    room = (high - low) * 0.05 if high - low > _FLAT * level else level * 0.05 or 1.0
    bands = [Mark(kind=f"{line.kind} band", shape="area", points=_band(line)) for line in lines if line.error]
    drawn = [
        Mark(
            kind=line.kind,
            shape="line",
            points=tuple(zip(line.series.steps, line.series.values, strict=True)),
            title=line.label,
        )
        for line in lines
    ]
    steps = range(0, last + 1, max(1, math.ceil(last / _TICKS)))
    return Chart(
        title=title,
        description=description,
        x=Axis(
            low=-0.015 * max(last, 1),
            high=1.015 * max(last, 1),
            label=over,
            ticks=tuple(Tick(at=s, label=str(s)) for s in steps),
        ),
        y=number_axis(low - room, high + room),
        marks=(*bands, *drawn),
        legend=tuple(Mark(kind=line.kind, shape="line", title=line.label) for line in lines if line.label),
    )


def _finite(series: Series) -> list[tuple[int, float]]:
    return [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]


def _band(line: Line) -> tuple[tuple[float, float], ...]:
    """The outline of a line's error band around its finite points."""
    points = _finite(line.series)
    return (*((s, v + line.error) for s, v in points), *((s, v - line.error) for s, v in reversed(points)))


def bar_chart(
    title: str,
    description: str,
    bars: Sequence[Bar],
    *,
    x_label: str,
    parts: Mapping[str, str] | None = None,
    reference: float | None = None,
    tick: Callable[[float], str] | None = None,
) -> Chart | None:
    """A chart with one row per bar, under its name; None without bars or finite lengths.

    `parts` maps the name of each stacked length to its CSS class. `reference` is a value marked by a line across all
    bars.
    """
    ends = [x for b in bars for x in (b.interval or (sum(b.lengths),)) if abs(x) <= _MAX_VALUE]
    if not ends:
        return None
    ends += [0.0] if reference is None else [0.0, reference]
    room = 0.04 * (max(ends) - min(ends)) or 1.0
    kinds = tuple((parts or {}).values())
    marks = [mark for i, bar in enumerate(bars) for mark in _bar_marks(bar, i)]
    if reference is not None:
        marks.insert(0, Mark(kind="move", shape="line", points=((reference, 0), (reference, len(bars)))))
    names = [b.name if len(b.name) <= _MAX_NAME else f"{b.name[: _MAX_NAME - 1]}…" for b in bars]
    return Chart(
        title=title,
        description=description,
        x=number_axis(min(ends) - room if min(ends) < 0 else 0.0, max(ends) + room, x_label, tick),
        y=Axis(low=len(bars), high=0),
        marks=tuple(marks),
        boxes=tuple(box for i, bar in enumerate(bars) for box in _bar_boxes(bar, kinds, i)),
        rows=tuple((name, bar.text) for name, bar in zip(names, bars, strict=True)),
        legend=tuple(Mark(kind=kind, shape="square", title=part) for part, kind in (parts or {}).items()),
    )


def _is_drawn(bar: Bar) -> bool:
    return all(map(math.isfinite, (*bar.lengths, *(bar.interval or ()))))


def _bar_marks(bar: Bar, row: int) -> list[Mark]:
    if bar.interval is None or not _is_drawn(bar):
        return []
    y = row + 0.72
    low, high = bar.interval
    return [
        Mark(kind="peak", shape="whisker", points=((low, y), (high, y)), title=bar.name),
        Mark(kind="series-0", shape="circle", points=((bar.lengths[0], y),), title=bar.name),
    ]


def _bar_boxes(bar: Bar, kinds: Sequence[str], row: int) -> list[Box]:
    if bar.interval is not None or not _is_drawn(bar):
        return []
    boxes, end = [], 0.0
    for i, length in enumerate(bar.lengths):
        kind = kinds[i] if kinds else "series-0"
        boxes.append(Box(kind=kind, x=(end, end + length), y=(row + 0.86, row + 0.58), title=bar.name))
        end += length
    return boxes


def number_axis(low: float, high: float, label: str = "", text: Callable[[float], str] | None = None) -> Axis:
    """An axis with round tick values, with just enough digits to tell them apart; its ends are limited."""
    low, high = max(-_MAX_VALUE, low), min(_MAX_VALUE, high)  # also for NaN
    step = round_step((high - low) / _TICKS)
    digits = -math.floor(math.log10(step))
    leading = math.floor(math.log10(max(abs(low), abs(high)))) + digits
    form = f".{max(0, digits)}f" if digits <= _MAX_DIGITS else f".{max(0, leading)}e"
    return stepped_axis(low, high, step, text or (lambda value: format(value, form)), label)


def stepped_axis(low: float, high: float, step: float, text: Callable[[float], str], label: str = "") -> Axis:
    """An axis with a tick at every multiple of `step`."""
    multiples = (n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low=low, high=high, label=label, ticks=tuple(Tick(at=v, label=text(v)) for v in multiples))


def round_step(rough: float) -> float:
    """The smallest step of at least `rough` that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
