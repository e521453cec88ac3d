"""Charts that several pages draw: lines over the steps of a run, and bars with names. Both are narrow."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lpconv.report.plot import CHARACTER, NARROW, NUM_SHAPES, Axis, Mark, Plot, Text, Tick, mark_path, round_step
from lpconv.results import Series

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 476.0, 14.0, 190.0
_BELOW = 46.0  # room for the labels of the axis
_TICKS = 5
_MAX_DIGITS = 4  # after the point
_FLAT = 1e-5  # of the values: what varies less is a level line and the noise of its arithmetic
_BAR_LEFT, _BAR_RIGHT, _ROW, _BAR = 14.0, 474.0, 40.0, 11.0  # of a plot of bars
_MAX_NAME = 40


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series, its colour, and its words in the legend; without words it shares those of another.

    A band of `error` is drawn on either side of it.
    """

    series: Series
    colour: int
    label: str = ""
    is_dashed: bool = False
    error: float = 0.0

    @property
    def kind(self) -> str:
        return f"line series-{self.colour % NUM_SHAPES}" + (" dashed" if self.is_dashed else "")


def line_plot(name: str, title: str, description: str, lines: Sequence[Line]) -> Plot | None:
    """The finite points of the lines over the steps, on an axis that the title names; None where there are none."""
    of_lines = ((line.error, *p) for line in lines for p in zip(line.series.steps, line.series.values, strict=True))
    points = [(s, v + e) for error, s, v in of_lines if math.isfinite(v) for e in (-error, error)]
    if not points:
        return None
    low, high = min(v for _, v in points), max(v for _, v in points)
    level = max(abs(low), abs(high))
    room = (high - low) * 0.05 if high - low > _FLAT * level else level * 0.05 or 1.0
    last = max(s for s, _ in points)
    up = Axis(low=low - room, high=high + room, start=_BOTTOM, end=_TOP)
    across = Axis(low=0, high=max(last, 1), start=_LEFT + 6, end=_RIGHT - 6)
    bands = [Mark(kind=f"{line.kind} band", path=_band(line, across, up), title="") for line in lines if line.error]
    drawn = [Mark(kind=line.kind, path=_path(line.series, across, up), title=line.label) for line in lines]
    return Plot(
        name=name,
        title=title,
        description=description,
        x_label="step",
        x_ticks=uncut(Tick(position=across.at(s), label=str(s)) for s in _step_ticks(last)),
        y_ticks=_value_ticks(up),
        marks=(*bands, *drawn),
        legend=tuple(Mark(kind=line.kind, path="M1 7H13", title=line.label) for line in lines if line.label),
        width=NARROW,
        height=_BOTTOM + _BELOW,
        left=_LEFT,
        right=_RIGHT,
        bottom=_BOTTOM,
    )


def _path(series: Series, across: Axis, up: Axis) -> str:
    """Segments between finite points, a dash where one stands alone; a gap where a value is not finite."""
    points = zip(series.steps, series.values, strict=True)
    path = ""
    for is_finite, found in groupby(points, key=lambda p: math.isfinite(p[1])):
        if is_finite:
            ends = [f"{across.at(step)} {up.at(value)}" for step, value in found]
            path += f"M{'L'.join(ends)}" + ("m-3 0h6" if len(ends) == 1 else "")
    return path


def _band(line: Line, across: Axis, up: Axis) -> str:
    """The outline of the band of a line's error, around its finite points."""
    points = [p for p in zip(line.series.steps, line.series.values, strict=True) if math.isfinite(p[1])]
    above = [f"{across.at(step)} {up.at(value + line.error)}" for step, value in points]
    below = [f"{across.at(step)} {up.at(value - line.error)}" for step, value in reversed(points)]
    return f"M{'L'.join([*above, *below])}Z"


def _step_ticks(last: int) -> list[int]:
    return list(range(0, last + 1, max(1, math.ceil(last / _TICKS))))


def _value_ticks(axis: Axis, text: Callable[[float], str] | None = None) -> tuple[Tick, ...]:
    """Round numbers, with as many digits as tell them apart."""
    step = round_step((axis.high - axis.low) / _TICKS)
    digits = -math.floor(math.log10(step))
    leading = math.floor(math.log10(max(abs(axis.low), abs(axis.high)))) + digits
    form = f".{max(0, digits)}f" if digits <= _MAX_DIGITS else f".{max(0, leading)}e"
    return axis.ticks(step, text or (lambda value: format(value, form)))


def uncut(ticks: Iterable[Tick]) -> tuple[Tick, ...]:
    """Those whose labels, which lie around their places on the axis below, do not leave the picture."""
    halves = ((tick, len(tick.label) * CHARACTER / 2) for tick in ticks)
    return tuple(tick for tick, half in halves if half <= tick.position <= NARROW - half)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A name, its figure in words, and lengths end to end from zero; or one value with the interval around it."""

    name: str
    text: str
    lengths: tuple[float, ...]
    interval: tuple[float, float] | None = None
    series: int = 0


def bar_plot(
    name: str,
    title: str,
    description: str,
    bars: Sequence[Bar],
    *,
    x_label: str,
    parts: Mapping[str, str] | None = None,
    reference: float | None = None,
    tick: Callable[[float], str] | None = None,
) -> Plot | None:
    """A row for each bar, named above it; None without bars or finite lengths.

    `parts` are the CSS classes of the lengths of all bars by their names. `reference` is a value with a line across.
    """
    ends = [x for b in bars for x in (b.interval or (sum(b.lengths),)) if math.isfinite(x)]
    if not ends:
        return None
    ends += [0.0] if reference is None else [0.0, reference]
    room = 0.04 * (max(ends) - min(ends)) or 1.0
    low = min(ends) - room if min(ends) < 0 else 0.0
    axis = Axis(low=low, high=max(ends) + room, start=_BAR_LEFT, end=_BAR_RIGHT)
    bottom = _TOP + len(bars) * _ROW
    kinds = tuple((parts or {}).values())
    marks = [mark for i, bar in enumerate(bars) for mark in _bar_marks(bar, kinds, axis, _TOP + (i + 0.72) * _ROW)]
    if reference is not None:
        marks.insert(0, Mark(kind="move", path=f"M{axis.at(reference)} {_TOP}V{bottom}", title=""))
    return Plot(
        name=name,
        title=title,
        description=description,
        x_label=x_label,
        x_ticks=uncut(_value_ticks(axis, tick)),
        y_ticks=(),
        marks=tuple(marks),
        texts=tuple(text for i, bar in enumerate(bars) for text in _bar_texts(bar, _TOP + (i + 0.4) * _ROW)),
        legend=tuple(Mark(kind=kind, path=mark_path(1, 7, 7, 5), title=part) for part, kind in (parts or {}).items()),
        width=NARROW,
        height=bottom + _BELOW,
        left=_BAR_LEFT,
        right=_BAR_RIGHT,
        bottom=bottom,
    )


def _bar_marks(bar: Bar, kinds: Sequence[str], axis: Axis, y: float) -> list[Mark]:
    if not all(map(math.isfinite, (*bar.lengths, *(bar.interval or ())))):
        return []
    if bar.interval is not None:
        low, high = map(axis.at, bar.interval)
        ends = "".join(f"M{x} {y - _BAR / 2}v{_BAR}" for x in (low, high))
        return [
            Mark(kind="peak", path=f"M{low} {y}H{high}{ends}", title=bar.name),
            Mark(
                kind=f"series-{bar.series % NUM_SHAPES}",
                path=mark_path(0, axis.at(bar.lengths[0]), y, 4.5),
                title=bar.name,
            ),
        ]
    marks, end = [], 0.0
    for i, length in enumerate(bar.lengths):
        left, right = axis.at(end), axis.at(end + length)
        kind = kinds[i] if kinds else f"series-{bar.series % NUM_SHAPES}"
        marks.append(Mark(kind=kind, path=f"M{left} {y - _BAR / 2}H{right}v{_BAR}H{left}z", title=bar.name))
        end += length
    return marks


def _bar_texts(bar: Bar, y: float) -> tuple[Text, Text]:
    name = bar.name if len(bar.name) <= _MAX_NAME else bar.name[: _MAX_NAME - 1] + "…"
    return Text(x=_BAR_LEFT + 4, y=y, text=name, kind="ink"), Text(x=_BAR_RIGHT - 4, y=y, text=bar.text, anchor="end")
