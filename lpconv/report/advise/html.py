"""The page of an advice: recommendations, quality against what it takes, every candidate, each layer's part."""

import math
from pathlib import PurePath

from lpconv.report.advise.words import COLUMNS, HEADINGS, PART_COLUMNS, cells, gap_text, of_purpose, part_rows, unit_of
from lpconv.report.charts import Bar, bar_plot, uncut
from lpconv.report.numbers import duration_text, plural, size_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import NARROW, Axis, Mark, Plot, Text, mark_path, round_step
from lpconv.report.printable import printable_record
from lpconv.results import AdviceResult, AdviceRow

__all__ = ["front_plot", "html_advice"]

_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 62.0, 476.0, 14.0, 240.0, 286.0
_RADIUS = 4.5
_LEAST = 1e-5  # a gap below is drawn there: the axis is logarithmic
_PARTS = 8  # tensors in the plot


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
        tables=[(HEADINGS[p], COLUMNS[p], [cells(result, r) for r in of_purpose(result, p)]) for p in purposes],
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
    """Gap against size, of training against memory, with intervals; None where fewer than two were measured."""
    rows = [r for r in of_purpose(result, purpose) if _is_drawn(r)]
    if len(rows) < 2:
        return None
    quality = float(result.options["budget"]["quality"])
    gaps = [g for r in rows if r.gap for g in (r.gap.value, r.gap.high)] + [quality]
    low, high = (math.log10(max(f(gaps), _LEAST)) for f in (min, max))
    up = Axis(low=math.floor(low), high=math.ceil(high + 0.01), start=_BOTTOM, end=_TOP)
    across = Axis(low=0.0, high=1.05 * max(_x(r) for r in rows), start=_LEFT, end=_RIGHT)
    advised = {(a.purpose, a.row) for a in result.recommendations}
    limit = up.at(math.log10(quality))
    marks = [Mark(kind="move", path=f"M{_LEFT} {limit}H{_RIGHT}", title="budget")]
    for r in rows:
        marks += _marks(r, across, up, is_advised=(purpose, r.name) in advised)
    taken = "size" if purpose == "infer" else "memory"
    return Plot(
        name=f"front-{purpose}",
        title=f"{HEADINGS[purpose]}: quality against {taken}",
        description="Lower and further left is better. Bars are 95 % intervals, the line is the budget.",
        x_label="size on disk" if purpose == "infer" else "memory of a step",
        x_ticks=uncut(across.ticks(round_step(across.high / 4), size_text)),
        y_ticks=up.ticks(1, lambda e: f"1e{e}"),
        marks=tuple(marks),
        texts=tuple(_label(r, across, up) for r in rows if (purpose, r.name) in advised),
        legend=(
            Mark(kind="series-1", path=mark_path(3, 7, 7, 5), title="recommended"),
            Mark(kind="series-0", path=mark_path(0, 7, 7, 4), title="gap, measured"),
        ),
        width=NARROW,
        height=_HEIGHT,
        left=_LEFT,
        right=_RIGHT,
        bottom=_BOTTOM,
    )


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


def _y(gap: float, up: Axis) -> float:
    return up.at(math.log10(max(gap, _LEAST)))


def _marks(row: AdviceRow, across: Axis, up: Axis, *, is_advised: bool) -> list[Mark]:
    assert row.gap is not None
    x, y = across.at(_x(row)), _y(row.gap.value, up)
    colour = 1 if is_advised else 0
    bar = f"M{x} {_y(row.gap.high, up)}V{_y(row.gap.low, up)}"
    shape = mark_path(3 if is_advised else 0, x, y, _RADIUS + 2 * is_advised)
    return [
        Mark(kind=f"line series-{colour}", path=bar, title=row.name),
        Mark(kind=f"series-{colour}", path=shape, title=row.name),
    ]


def _label(row: AdviceRow, across: Axis, up: Axis) -> Text:
    """The name beside a mark, on the side where there is room."""
    assert row.gap is not None
    x, y = across.at(_x(row)), _y(row.gap.value, up) - 10
    is_left = x < (_LEFT + _RIGHT) / 2
    return Text(x=x + (9 if is_left else -9), y=y, text=row.name, anchor="start" if is_left else "end", kind="ink")
