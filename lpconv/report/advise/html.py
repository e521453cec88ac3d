"""The page of an advice: recommendations, quality against what it takes, every candidate, each layer's part."""

import math
from collections.abc import Callable
from pathlib import PurePath

from lpconv.report.advise.words import COLUMNS, HEADINGS, PART_COLUMNS, cells, gap_text, of_purpose, part_rows, unit_of
from lpconv.report.charts_old import Bar, bar_plot, uncut
from lpconv.report.numbers import duration_text, plural, size_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import NARROW, Axis, Mark, Plot, Text, Tick, mark_path, round_step
from lpconv.report.printable import printable_record
from lpconv.results import AdviceResult, AdviceRow

_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 62.0, 476.0, 14.0, 240.0, 286.0
_RADIUS = 4.5
_PARTS = 8  # tensors in the plot
_ITSELF = Mark(kind="series-2", path=mark_path(1, 7, 7, 4), title="the model itself")


def _rows(result: AdviceResult, purpose: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The cells of the candidates that were measured, and those of the others."""
    rows = of_purpose(result, purpose)
    measured = [cells(result, r) for r in rows if r.status == "measured"]
    return measured, [cells(result, r) for r in rows if r.status != "measured"]


def html_advice(result: AdviceResult) -> str:
    """The page of one advice."""
    result = printable_record(result)
    purposes = [p for p in HEADINGS if of_purpose(result, p)]
    return page(
        "advice",
        result=result,
        name=PurePath(result.name).name or result.name,
        version=result.versions.get("lpconv"),
        headings=HEADINGS,
        tiles=_tiles(result),
        plots=[*(front_plot(result, p) for p in purposes), _parts_plot(result)],
        tables=[(HEADINGS[p], COLUMNS[p], *_rows(result, p)) for p in purposes],
        part_columns=PART_COLUMNS,
        parts=part_rows(result),
        facts=result.facts | {"Took": duration_text(result.seconds)} | result.versions,
    )


def _tiles(result: AdviceResult) -> tuple[Tile, ...]:
    by_name = {(r.purpose, r.name): r for r in result.rows}
    tiles: list[Tile] = []
    for advised in result.recommendations:
        row = by_name.get((advised.purpose, advised.row or ""))
        if row is None or row.gap is None:
            tiles.append((HEADINGS[advised.purpose], "nothing", "stays within the budget for certain"))
            continue
        tiles.append((HEADINGS[advised.purpose], row.name, f"gap {gap_text(row.gap, unit_of(result, row))}"))
    counted = sum(r.status == "measured" for r in result.rows)
    return (*tiles, ("Tried", plural(counted, "candidate"), f"of {len(result.rows)}, {duration_text(result.seconds)}"))


def front_plot(result: AdviceResult, purpose: str) -> Plot | None:
    """Gap against size, of training against memory, with intervals; None where there are not two to compare.

    Gaps on both sides of zero have their place: the axis is linear up to a tenth of the budget's power of ten, and
    logarithmic beyond (asinh).
    """
    rows = [r for r in of_purpose(result, purpose) if _is_drawn(r)]
    start = float(result.source_bytes) if purpose == "infer" else 0.0
    if len(rows) + bool(start) < 2 or not rows:
        return None
    quality = float(result.options["budget"]["quality"])
    unit = 10.0 ** (math.floor(math.log10(quality)) - 1)
    ends = [0.0, quality, *(e for r in rows if r.gap for e in (r.gap.low, r.gap.high))]
    low, high = math.asinh(min(ends) / unit) - 0.3, math.asinh(max(ends) / unit) + 0.3
    up = Axis(low=low, high=high, start=_BOTTOM, end=_TOP)
    across = Axis(low=0.0, high=1.05 * max(start, *(_x(r) for r in rows)), start=_LEFT, end=_RIGHT)

    def y(gap: float) -> float:
        return up.at(math.asinh(gap / unit))

    advised = {(a.purpose, a.row) for a in result.recommendations}
    marks = [Mark(kind="move", path=f"M{_LEFT} {y(quality)}H{_RIGHT}", title="budget")]
    if start:
        marks.append(Mark(kind=_ITSELF.kind, path=mark_path(1, across.at(start), y(0.0), _RADIUS), title=_ITSELF.title))
    for r in rows:
        marks += _marks(r, across.at(_x(r)), y, is_advised=(purpose, r.name) in advised)
    taken = "size" if purpose == "infer" else "memory"
    return Plot(
        name=f"front-{purpose}",
        title=f"{HEADINGS[purpose]}: quality against {taken}",
        description="Lower and further left is better. Bars are 95 % intervals, the line is the budget. The scale of "
        f"gaps is linear around zero and logarithmic beyond {unit:g}.",
        x_label="size on disk" if purpose == "infer" else "memory of a step",
        x_ticks=uncut(across.ticks(round_step(across.high / 4), size_text)),
        y_ticks=tuple(Tick(position=y(g), label=f"{g:g}") for g in _gap_ticks(unit, min(ends), max(ends))),
        marks=tuple(marks),
        texts=tuple(_label(r, across.at(_x(r)), y) for r in rows if (purpose, r.name) in advised),
        legend=(
            Mark(kind="series-1", path=mark_path(3, 7, 7, 5), title="recommended"),
            Mark(kind="series-0", path=mark_path(0, 7, 7, 4), title="gap, measured"),
            *([_ITSELF] if start else []),
        ),
        width=NARROW,
        height=_HEIGHT,
        left=_LEFT,
        right=_RIGHT,
        bottom=_BOTTOM,
    )


def _gap_ticks(unit: float, low: float, high: float) -> list[float]:
    """Zero, and powers of ten from `unit` on, on either side as far as the gaps go."""
    powers = [unit * 10.0**n for n in range(20)]
    return [*(-p for p in powers if -p >= low), 0.0, *(p for p in powers if p <= high)]


def _parts_plot(result: AdviceResult) -> Plot | None:
    """The tensors that cost most, as bars."""
    bars = [Bar(name=p.tensor, text=f"{p.divergence:.1e}", lengths=(p.divergence,)) for p in result.parts[:_PARTS]]
    words = "nats of divergence" if result.metric == "loss" else "relative error of the output"
    return bar_plot(
        "parts",
        "Each tensor's part",
        f"The model with that tensor alone as {result.parts_of} stores it; those that cost most.",
        bars,
        x_label=words,
        tick=lambda value: f"{value:.2g}",
    )


def _x(row: AdviceRow) -> float:
    return float((row.size_bytes if row.purpose == "infer" else row.memory_bytes) or 0)


def _is_drawn(row: AdviceRow) -> bool:
    return row.status == "measured" and row.gap is not None and math.isfinite(row.gap.high) and _x(row) > 0


def _marks(row: AdviceRow, x: float, y: Callable[[float], float], *, is_advised: bool) -> list[Mark]:
    assert row.gap is not None
    colour = 1 if is_advised else 0
    shape = mark_path(3 if is_advised else 0, x, y(row.gap.value), _RADIUS + 2 * is_advised)
    return [
        Mark(kind=f"line series-{colour}", path=f"M{x} {y(row.gap.high)}V{y(row.gap.low)}", title=row.name),
        Mark(kind=f"series-{colour}", path=shape, title=row.name),
    ]


def _label(row: AdviceRow, x: float, y: Callable[[float], float]) -> Text:
    """The name beside a mark, on the side where there is room."""
    assert row.gap is not None
    is_left = x < (_LEFT + _RIGHT) / 2
    anchor = "start" if is_left else "end"
    return Text(x=x + (9 if is_left else -9), y=y(row.gap.value) - 10, text=row.name, anchor=anchor, kind="ink")
