"""Several benches side by side: bars of all their rows in one plot, and each row's figures in every document."""

from collections.abc import Iterable, Sequence

from lpconv.report.bench.html import memory_plot, speed_plot
from lpconv.report.bench.text import ratio_text
from lpconv.report.compare import Figure, figures_of
from lpconv.report.numbers import MISSING, listed, plural, size_text
from lpconv.report.page import html_runs
from lpconv.report.printable import printable, printable_record
from lpconv.results import BenchResult


def html_benches(results: Sequence[BenchResult], names: Sequence[str]) -> str:
    """One page of several benches."""
    benches, names = [printable_record(r) for r in results], list(map(printable, names))
    rows = [(f"{r.name}: {n}", r) for n, b in zip(names, benches, strict=True) for r in b.rows]
    words = [" ".join(s for v in b.verdicts for s in v.sentences) or "No verdict was kept." for b in benches]
    return html_runs(names, bench_figures(benches), [speed_plot(rows), memory_plot(rows)], words)


def bench_figures(results: Sequence[BenchResult]) -> tuple[Figure, ...]:
    """What each bench was, then speed-up and peak memory of every row that any of them has."""
    return figures_of([_figures(r) for r in results])


def _figures(bench: BenchResult) -> dict[str, str]:
    def all_of(values: Iterable[str]) -> str:
        return listed(list(dict.fromkeys(v for v in values if v))) or MISSING

    found = {
        "model": all_of(r.model for r in bench.rows),
        "device": all_of(r.device for r in bench.rows if r.timing),
        "baseline": all_of(r.baseline for r in bench.rows),
        "weights": all_of(r.weights for r in bench.rows),
        "measured": plural(sum(r.status == "ok" for r in bench.rows), "row"),
    }
    for r in bench.rows:
        speed = "baseline" if r.is_baseline else ratio_text(r.ratio) if r.status == "ok" else r.status
        found[f"{r.name}, {r.place}: speed-up"] = speed
        found[f"{r.name}, {r.place}: peak memory"] = size_text(r.peak_memory)
    return found
