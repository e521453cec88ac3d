"""The page of a bench: the verdict first, then speed-ups and memory as plots, every row, and the Linears by shape."""

import math
from collections.abc import Callable, Sequence

from lpconv.report.bench.text import (
    CHANGE_COLUMNS,
    COLUMNS,
    change_rows,
    energy_text,
    gemm_text,
    peaks_text,
    predicted,
    processes_text,
    ratio_text,
    reasons,
)
from lpconv.report.numbers import MISSING, duration_text, size_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import CHARACTER, Axis, Mark, Plot, Tick, column_x, dash_path, mark_path
from lpconv.report.printable import printable_record
from lpconv.results import BenchResult, BenchRow

__all__ = ["html_bench", "memory_plot", "speed_plot"]

_RADIUS = 4.5
_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_PARTS = ("weights", "optimizer", "gradients", "activations", "other")


def html_bench(result: BenchResult) -> str:
    """The page of one bench."""
    result = printable_record(result)
    return page(
        "bench",
        result=result,
        name=", ".join(dict.fromkeys(r.model for r in result.rows)) or "nothing",
        version=result.versions.get("lpconv"),
        tiles=_tiles(result),
        speed=speed_plot(result.rows),
        memory=memory_plot(result.rows),
        columns=list(COLUMNS),
        cells=[[cell(r) for cell in COLUMNS.values()] for r in result.rows],
        reasons=reasons(result.rows),
        facts=_facts(result),
        change_columns=CHANGE_COLUMNS,
        changes=change_rows(result),
        gain=gemm_text,
        predicted=predicted,
    )


def _tiles(result: BenchResult) -> tuple[Tile, ...]:
    """The fastest, the smallest and the most exact of the variants."""
    variants = [r for r in result.rows if not r.is_baseline and r.status == "ok"]
    tiles = []
    if fastest := max((r for r in variants if r.ratio), key=lambda r: r.ratio.value if r.ratio else 0, default=None):
        tiles.append(("Fastest, against the baseline", ratio_text(fastest.ratio), fastest.name))
    if smallest := min((r for r in variants if r.peak_memory), key=lambda r: r.peak_memory or 0, default=None):
        tiles.append(("Least peak memory", COLUMNS["Peak"](smallest), smallest.name))
    if best := min(
        (r for r in variants if r.numerics), key=lambda r: r.numerics.output_error if r.numerics else 0, default=None
    ):
        tiles.append(("Smallest output error", COLUMNS["Output err."](best), best.name))
    return tuple(tiles)


def _facts(result: BenchResult) -> dict[str, str]:
    facts = {
        "Command": result.command or MISSING,
        "Baseline": ", ".join(dict.fromkeys(r.baseline for r in result.rows)),
        "Device": ", ".join(dict.fromkeys(r.device for r in result.rows if r.timing)),
        **({"Processes": processes_text(result.rows[0])} if result.rows and result.rows[0].parallel else {}),
        "Took": duration_text(result.seconds),
    }
    if result.peaks is not None:
        facts["Measured peaks"] = peaks_text(result.peaks)
    facts |= {
        f"Energy per step, {r.name}": energy_text(r)
        for r in result.rows
        if r.energy and r.energy.joules_per_step is not None
    }
    return facts | {f"Version of {name}": version for name, version in sorted(result.versions.items())}


def speed_plot(rows: Sequence[BenchRow]) -> Plot | None:
    """Every variant's speed-up over its baseline, with the 95 % interval; None without one."""
    shown = [r for r in rows if r.ratio is not None and not r.is_baseline]
    if not shown:
        return None
    axis = Axis(low=0, high=1.1 * max(1.0, *(r.ratio.high for r in shown if r.ratio)))
    marks = [mark for i, r in enumerate(shown) for mark in _interval(r, column_x(i + 0.5, len(shown)), axis)]
    parity = column_x(0, 1), column_x(1, 1)
    marks.append(Mark(kind="move", path=f"M{parity[0]} {axis.at(1)}H{parity[1]}", title="the baseline"))
    return Plot(
        name="speed",
        title="Speed-up over the baseline",
        description="Baseline time over time, with 95 % intervals; above 1 is faster.",
        y_label="speed-up",
        x_ticks=_ticks(shown),
        y_ticks=_y_ticks(axis, "{:g}".format),
        marks=tuple(marks),
    )


def memory_plot(rows: Sequence[BenchRow]) -> Plot | None:
    """The peak of every row as a column, weights at the bottom; None where no memory was measured."""
    shown = [r for r in rows if r.memory is not None]
    if not shown:
        return None
    top = 1.05 * max(r.memory.parts.total for r in shown if r.memory)
    axis, unit = Axis(low=0, high=top), size_text(top).split()[1]
    present = [i for i, part in enumerate(_PARTS) if any(getattr(r.memory.parts, part) for r in shown if r.memory)]
    marks = [mark for i, r in enumerate(shown) for mark in _column(r, i, len(shown), axis)]
    return Plot(
        name="memory",
        title="Memory of tensors at the peak",
        description="What takes up memory when a step needs most.",
        y_label=unit,
        x_ticks=_ticks(shown),
        y_ticks=_y_ticks(axis, lambda size: f"{size / _UNITS[unit]:g}"),
        marks=tuple(marks),
        legend=tuple(Mark(kind=f"series-{i}", path=mark_path(1, 7, 7, 5), title=_PARTS[i]) for i in present),
    )


def _interval(row: BenchRow, x: float, axis: Axis) -> list[Mark]:
    assert row.ratio is not None
    low, value, high = axis.at(row.ratio.low), axis.at(row.ratio.value), axis.at(row.ratio.high)
    title = f"{_label(row)}: {ratio_text(row.ratio)}"
    whisker = f"M{x} {low}V{high}{dash_path(x, low, _RADIUS)}{dash_path(x, high, _RADIUS)}"
    return [
        Mark(kind="peak", path=whisker, title=title),
        Mark(kind="after", path=mark_path(0, x, value, _RADIUS), title=title),
    ]


def _column(row: BenchRow, index: int, count: int, axis: Axis) -> list[Mark]:
    assert row.memory is not None
    left, right = column_x(index + 0.2, count), column_x(index + 0.8, count)
    marks, below = [], 0
    for series, part in enumerate(_PARTS):
        size = getattr(row.memory.parts, part)
        y, y_top = axis.at(below), axis.at(below + size)
        path = f"M{left} {y}H{right}V{y_top}H{left}z"
        marks.append(Mark(kind=f"series-{series}", path=path, title=f"{_label(row)}: {part} {size_text(size)}"))
        below += size
    return marks


def _label(row: BenchRow) -> str:
    return f"{row.name}, {row.place}"


def _ticks(rows: Sequence[BenchRow]) -> tuple[Tick, ...]:
    """Names under the columns, numbers where there is no room for them."""
    room = (column_x(1, len(rows)) - column_x(0, len(rows))) / CHARACTER
    fits = all(len(r.name) <= room for r in rows)
    return tuple(
        Tick(position=column_x(i + 0.5, len(rows)), label=r.name if fits else str(i + 1)) for i, r in enumerate(rows)
    )


def _y_ticks(axis: Axis, text: Callable[[float], str]) -> tuple[Tick, ...]:
    step = 10.0 ** math.floor(math.log10(axis.high))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if axis.high / s <= 8)
    return axis.ticks(step, text)
