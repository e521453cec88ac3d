"""Several benches side by side: bars of all their rows in one plot, and each row's figures in every document."""

from collections.abc import Callable, Sequence

from lpconv.report.bench.html import memory_plot, speed_plot
from lpconv.report.bench.text import ratio_text
from lpconv.report.compare import Figure
from lpconv.report.numbers import MISSING, listed, plural, size_text
from lpconv.report.page import html_runs
from lpconv.report.printable import printable, printable_record
from lpconv.results import BenchResult, BenchRow

__all__ = ["bench_figures", "html_benches"]


def html_benches(results: Sequence[BenchResult], names: Sequence[str]) -> str:
    """One page of several benches."""
    benches, names = [printable_record(r) for r in results], list(map(printable, names))
    rows = [(f"{r.name}: {n}", r) for n, b in zip(names, benches, strict=True) for r in b.rows]
    words = [" ".join(s for v in b.verdicts for s in v.sentences) or "No verdict was kept." for b in benches]
    return html_runs(names, bench_figures(benches), [speed_plot(rows), memory_plot(rows)], words)


def bench_figures(results: Sequence[BenchResult]) -> tuple[Figure, ...]:
    """What each bench was, then speed-up and peak memory of every row that any of them has."""
    facts: dict[str, Callable[[BenchResult], str]] = {
        "model": lambda b: listed(list(dict.fromkeys(r.model for r in b.rows))),
        "device": lambda b: listed(list(dict.fromkeys(r.device for r in b.rows if r.timing))) or MISSING,
        "baseline": lambda b: listed(list(dict.fromkeys(r.baseline for r in b.rows))),
        "weights": lambda b: listed(list(dict.fromkeys(r.weights for r in b.rows if r.weights))) or MISSING,
        "measured": lambda b: plural(sum(r.status == "ok" for r in b.rows), "row"),
    }
    kept = [Figure(label=label, values=tuple(map(value, results))) for label, value in facts.items()]
    labels = dict.fromkeys(_label(r) for b in results for r in b.rows)
    for label in labels:
        found = [next((r for r in b.rows if _label(r) == label), None) for b in results]
        kept.append(Figure(label=f"{label}: speed-up", values=tuple(map(_speed, found))))
        kept.append(Figure(label=f"{label}: peak memory", values=tuple(map(_peak, found))))
    return tuple(f for f in kept if set(f.values) != {MISSING})


def _label(row: BenchRow) -> str:
    return f"{row.name}, {row.place}"


def _speed(row: BenchRow | None) -> str:
    if row is None:
        return MISSING
    return "baseline" if row.is_baseline else ratio_text(row.ratio) if row.status == "ok" else row.status


def _peak(row: BenchRow | None) -> str:
    return MISSING if row is None else size_text(row.peak_memory)
