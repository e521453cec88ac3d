"""The page of a bench: the verdict first, then speed-ups and memory as plots, every row, and the Linears by shape."""

from lpconv.report.bench.plot import memory_plot, speed_plot
from lpconv.report.bench.text import (
    COLUMNS,
    energy_text,
    gemm_text,
    peaks_text,
    predicted,
    processes_text,
    ratio_text,
    reasons,
)
from lpconv.report.numbers import MISSING, duration_text
from lpconv.report.page import Tile, environment
from lpconv.report.printable import printable_record
from lpconv.results import BenchResult

__all__ = ["html_bench"]


def html_bench(result: BenchResult) -> str:
    """The page of one bench."""
    result = printable_record(result)
    return (
        environment()
        .get_template("bench.html.j2")
        .render(
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
            ratio=ratio_text,
            gain=gemm_text,
            predicted=predicted,
        )
    )


def _tiles(result: BenchResult) -> tuple[Tile, ...]:
    """The fastest, the smallest and the most exact of the variants."""
    variants = [r for r in result.rows if not r.is_baseline and r.status == "ok"]
    tiles = []
    if fastest := max((r for r in variants if r.ratio), key=lambda r: r.ratio.value if r.ratio else 0, default=None):
        tiles.append(Tile(label="Fastest, against the baseline", figure=ratio_text(fastest.ratio), detail=fastest.name))
    if smallest := min((r for r in variants if r.peak_memory), key=lambda r: r.peak_memory or 0, default=None):
        tiles.append(Tile(label="Least peak memory", figure=COLUMNS["Peak"](smallest), detail=smallest.name))
    if best := min(
        (r for r in variants if r.numerics), key=lambda r: r.numerics.output_error if r.numerics else 0, default=None
    ):
        tiles.append(Tile(label="Smallest output error", figure=COLUMNS["Output err."](best), detail=best.name))
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
