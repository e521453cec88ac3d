"""The page of a bench: the verdict first, then speed-ups and memory as plots, every row, and the Linears by shape."""

import dataclasses
from collections.abc import Sequence

from lpconv.report.bench.text import (
    CHANGE_COLUMNS,
    COLUMNS,
    best_speed,
    change_rows,
    energy_text,
    gemm_text,
    headline,
    labels,
    memory_text,
    notes,
    peaks_text,
    predicted,
    processes_text,
    ratio_text,
    reasons,
)
from lpconv.report.charts_old import Bar, bar_plot
from lpconv.report.numbers import MISSING, count_text, duration_text, size_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import Plot
from lpconv.report.printable import printable_record
from lpconv.results import BenchResult, BenchRow, VerdictRecord

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def html_bench(result: BenchResult) -> str:
    """The page of one bench."""
    result = printable_record(result)
    named = list(zip(labels(result.rows), result.rows, strict=True))
    return page(
        "bench",
        result=result,
        name=", ".join(dict.fromkeys(r.model for r in result.rows)) or "nothing",
        version=result.versions.get("lpconv"),
        headline=headline(result),
        outcome=_outcome(result),
        tiles=_tiles(result),
        plots=[p for p in (speed_plot(named), memory_plot(named)) if p],
        columns=list(COLUMNS),
        cells=[[cell(r) for cell in COLUMNS.values()] for r in result.rows],
        parts=[(n, memory_text(r)) for n, r in named if r.memory],
        gates=result.gates,
        remarks=[*reasons(result.rows), *notes(result)],
        facts=_facts(result),
        change_columns=CHANGE_COLUMNS,
        changes=change_rows(result),
        gemms=_gemms,
    )


def _outcome(result: BenchResult) -> str:
    """ "failed" if a gate does not hold, "passed" if something was faster than its baseline, else "not run"."""
    if not all(g.passed for g in result.gates):
        return "failed"
    best = best_speed(result.rows)
    return "passed" if best and best[0] == "fastest" else "not run"


def _tiles(result: BenchResult) -> tuple[Tile, ...]:
    """The fastest, the smallest and the most exact of the variants."""
    variants = [r for r in result.rows if not r.is_baseline and r.status == "ok"]
    tiles = []
    if best := best_speed(variants):
        tiles.append((f"{best[0].capitalize()}, against the baseline", ratio_text(best[1].ratio), best[1].name))
    if smallest := min((r for r in variants if r.peak_memory), key=lambda r: r.peak_memory or 0, default=None):
        tiles.append(("Least peak memory", COLUMNS["Peak"](smallest), smallest.name))
    exact = [(r.numerics.output_error, i) for i, r in enumerate(variants) if r.numerics]
    if exact:
        closest = variants[min(exact)[1]]
        tiles.append(("Smallest output error", COLUMNS["Output err."](closest), closest.name))
    return tuple(tiles)


def _facts(result: BenchResult) -> dict[str, str]:
    facts = {
        "Command": result.command or MISSING,
        "Baseline": ", ".join(dict.fromkeys(r.baseline for r in result.rows)),
        "Weights": ", ".join(dict.fromkeys(r.weights for r in result.rows if r.weights)) or MISSING,
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


def _gemms(verdict: VerdictRecord) -> tuple[list[str], list[tuple[str, ...]]]:
    """The Linears of a verdict by shape: headings and rows."""
    columns = ["First of its shape", "Count", "N", "K", "Tokens", "<Bound by"]
    rows = [(g.names[0], str(g.count), str(g.n), str(g.k), count_text(g.m), g.bound) for g in verdict.gemms]
    if not predicted(verdict):
        return columns, list(rows)
    even = [MISSING if g.break_even_tokens is None else count_text(g.break_even_tokens) for g in verdict.gemms]
    gains = [gemm_text(g.gain) for g in verdict.gemms]
    more = zip(rows, gains, even, strict=True)
    return [*columns, "fp8 gain", "Break-even tokens"], [(*row, gain, tokens) for row, gain, tokens in more]


def speed_plot(named: Sequence[tuple[str, BenchRow]]) -> Plot | None:
    """Every variant's speed-up over its baseline, with the 95 % interval; None without one."""
    bars = [
        Bar(name=n, text=ratio_text(r.ratio), lengths=(r.ratio.value,), interval=(r.ratio.low, r.ratio.high))
        for n, r in named
        if r.ratio and not r.is_baseline
    ]
    words = "Baseline time over time, with 95 % intervals; above 1 is faster."
    return bar_plot("speed", "Speed-up over the baseline", words, bars, x_label="speed-up", reference=1.0)


def memory_plot(named: Sequence[tuple[str, BenchRow]]) -> Plot | None:
    """The peak of every row part by part, weights first; None where no memory was measured."""
    shown = [(n, dataclasses.asdict(r.memory.parts)) for n, r in named if r.memory]
    if not shown:
        return None
    names = list(shown[0][1])
    present = [name for name in names if any(p[name] for _, p in shown)]
    unit = size_text(max(sum(p.values()) for _, p in shown)).split()[1]
    bars = [
        Bar(name=n, text=size_text(sum(p.values())), lengths=tuple(float(p[name]) for name in present))
        for n, p in shown
    ]
    return bar_plot(
        "memory",
        "Memory of tensors at the peak",
        "What takes up memory when a step needs most.",
        bars,
        x_label=unit,
        parts={name: f"series-{i}" for i, name in enumerate(names) if name in present},
        tick=lambda size: f"{size / _UNITS[unit]:g}",
    )
