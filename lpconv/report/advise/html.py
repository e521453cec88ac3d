"""The page of an advice: recommendations, quality against what it takes, every candidate, each layer's part."""

import math
from pathlib import PurePath

from lpconv.report.advise.words import (
    COLUMNS,
    HEADINGS,
    PART_COLUMNS,
    cells,
    gap_text,
    of_purpose,
    part_rows,
)
from lpconv.report.numbers import duration_text, number_text, plural, size_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import Axis, Mark, Plot, Text, Tick, mark_path
from lpconv.report.printable import printable_record
from lpconv.results import AdviceResult, AdviceRow

__all__ = ["front_plot", "html_advice"]

_LEFT, _RIGHT = 58.0, 986.0
_RADIUS = 4.5
_LEAST = 1e-5  # a gap below is drawn there: the axis is logarithmic


def html_advice(result: AdviceResult) -> str:
    """The page of one advice."""
    result = printable_record(result)
    tables = [
        (HEADINGS[p], COLUMNS[p], [cells(result, r) for r in of_purpose(result, p)], front_plot(result, p))
        for p in HEADINGS
        if of_purpose(result, p)
    ]
    return page(
        "advice",
        result=result,
        name=PurePath(result.name).name or result.name,
        version=result.versions.get("lpconv"),
        headings=HEADINGS,
        tiles=_tiles(result),
        tables=tables,
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
        unit = "loss" if row.purpose == "train" else result.metric
        tiles.append((HEADINGS[advised.purpose], row.name, f"gap {gap_text(row.gap, unit)}"))
    counted = sum(r.status == "measured" for r in result.rows)
    return (*tiles, ("Tried", plural(counted, "candidate"), f"of {len(result.rows)}, {duration_text(result.seconds)}"))


def front_plot(result: AdviceResult, purpose: str) -> Plot | None:
    """Gap against size, of training against memory, with intervals; None where fewer than two were measured."""
    rows = [r for r in of_purpose(result, purpose) if r.status == "measured" and _x(r) and _is_drawn(r)]
    if len(rows) < 2:
        return None
    quality = float(result.options["budget"]["quality"])
    gaps = [g for r in rows if r.gap for g in (r.gap.value, r.gap.high)] + [quality]
    low, high = (math.log10(max(f(gaps), _LEAST)) for f in (min, max))
    up = Axis(low=math.floor(low), high=math.ceil(high + 0.01))
    across = Axis(low=0.0, high=1.05 * max(_x(r) for r in rows), start=_LEFT, end=_RIGHT)
    advised = {(a.purpose, a.row) for a in result.recommendations}
    marks = [m for r in rows for m in _marks(r, across, up, is_advised=(purpose, r.name) in advised)]
    limit = up.at(math.log10(quality))
    marks.insert(0, Mark(kind="line series-5", path=f"M{_LEFT} {limit}H{_RIGHT}", title=f"budget, {quality:g}"))
    taken = "size on disk" if purpose == "infer" else "memory of a step"
    what = "gap to the model itself" if purpose == "infer" else "gap to the fp32 twin, foretold"
    return Plot(
        name=f"front-{purpose}",
        title=f"{HEADINGS[purpose]}: quality against {taken}",
        description=f"Lower and further left is better. The line is the budget of {quality:g}; bars: 95 %.",
        x_label=taken,
        y_label=what,
        x_ticks=_size_ticks(across),
        y_ticks=up.ticks(1, lambda e: f"1e{e}"),
        marks=tuple(marks),
        texts=tuple(_label(r, across, up) for r in rows if (purpose, r.name) in advised),
        legend=(
            Mark(kind="series-1", path=mark_path(3, 7, 7, 5), title="recommended"),
            Mark(kind="series-0", path=mark_path(0, 7, 7, 4), title="measured"),
        ),
    )


def _x(row: AdviceRow) -> float:
    return float((row.size_bytes if row.purpose == "infer" else row.memory_bytes) or 0)


def _is_drawn(row: AdviceRow) -> bool:
    return row.gap is not None and math.isfinite(row.gap.high)


def _marks(row: AdviceRow, across: Axis, up: Axis, *, is_advised: bool) -> list[Mark]:
    assert row.gap is not None
    x = across.at(_x(row))
    y, top, bottom = (up.at(math.log10(max(v, _LEAST))) for v in (row.gap.value, row.gap.high, row.gap.low))
    title = f"{row.name}: {size_text(_x(row))}, gap {number_text(row.gap.value)}, at most {number_text(row.gap.high)}"
    colour = 1 if is_advised else 0
    bar = Mark(kind=f"line series-{colour}", path=f"M{x} {top}V{bottom}", title=title)
    shape = mark_path(3 if is_advised else 0, x, y, _RADIUS + 2 * is_advised)
    return [bar, Mark(kind=f"series-{colour}", path=shape, title=title)]


def _label(row: AdviceRow, across: Axis, up: Axis) -> Text:
    """The name of a row beside its mark, on the side that has room."""
    assert row.gap is not None
    x, y = across.at(_x(row)), up.at(math.log10(max(row.gap.value, _LEAST))) + 4
    if x > (_LEFT + _RIGHT) / 2:
        return Text(x=x - 12, y=y, text=row.name, anchor="end", kind="ink")
    return Text(x=x + 12, y=y, text=row.name, kind="ink")


def _size_ticks(axis: Axis) -> tuple[Tick, ...]:
    rough = axis.high / 6
    exponent = math.floor(math.log10(rough))
    step = next(m * 10.0**exponent for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough)
    return axis.ticks(step, size_text)
