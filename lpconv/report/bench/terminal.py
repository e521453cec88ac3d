"""A bench on the terminal: rows, memory by part, what the GPU said, Linears by shape, and the verdict last.

Import this module lazily: it loads rich.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.bench.text import (
    CHANGE_COLUMNS,
    COLUMNS,
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
    reasons,
)
from lpconv.report.numbers import MISSING, gate_lines, number_text, plural, size_text
from lpconv.report.printable import printable_record
from lpconv.report.terminal import Name, facts_grid, heading, note_list, section, table_of
from lpconv.results import BenchResult, VerdictRecord

_PREDICTED = ("fp8 gain", "Break-even")
# Columns that say something only where rows differ in them.
_OPTIONAL = ("Mode", "Batch", "Compiled", "Grad. err.", "Saved")


def render_bench(result: BenchResult) -> RenderableType:
    """Everything that was measured, and what it means."""
    result = printable_record(result)
    return Group(
        *_head(result),
        _rows(result),
        *note_list("Not measured", reasons(result.rows)),
        *_memory(result),
        *_gpu(result),
        *(part for verdict in result.verdicts for part in _verdict(verdict)),
        *_changes(result),
        *note_list("Gates", gate_lines(result.gates)),
        *note_list("Notes", notes(result)),
    )


def _head(result: BenchResult) -> tuple[RenderableType, ...]:
    if not result.rows:
        return heading("No row was measured.")
    first = next((r for r in result.rows if r.timing is not None), result.rows[0])
    weights = f", {first.weights} weights" if first.weights else ""
    facts = {
        "Device": first.device,
        "Model": f"{first.model}, {plural(first.layers, 'layer')}{weights}" if first.layers else first.model,
        "Baseline": ", ".join(dict.fromkeys(r.baseline for r in result.rows)),
    }
    if first.parallel is not None:
        facts["Processes"] = processes_text(first)
    if result.peaks is not None:
        facts["Measured peaks"] = peaks_text(result.peaks)
    title = f"lpconv bench, {headline(result)}" + (" (interrupted)" if result.interrupted else "")
    return (*heading(title), facts_grid(facts), Text())


def _rows(result: BenchResult) -> RenderableType:
    cells = {name: [cell(r) for r in result.rows] for name, cell in COLUMNS.items()}
    shown = [name for name in COLUMNS if name not in _OPTIONAL or len(set(cells[name])) > 1]
    return table_of(*shown, rows=zip(*(cells[name] for name in shown), strict=True))


def _memory(result: BenchResult) -> tuple[RenderableType, ...]:
    named = zip(labels(result.rows), result.rows, strict=True)
    rows = [(label, size_text(r.memory.peak_bytes), memory_text(r)) for label, r in named if r.memory is not None]
    return section("Memory of tensors at the peak of a step", table_of("Configuration", "Peak", "<By part", rows=rows))


def _gpu(result: BenchResult) -> tuple[RenderableType, ...]:
    watched = [r for r in result.rows if r.gpu is not None]
    if not watched:
        return section("Energy", Text("not available: there is no GPU, or nvidia-ml-py is not installed"))
    rows = []
    for label, r in zip(labels(watched), watched, strict=True):
        assert r.gpu is not None
        numbers = (r.gpu.sm_clock_mhz, r.gpu.power_w, r.gpu.power_limit_w)
        others = ", ".join(map(str, r.gpu.foreign_processes))
        rows.append((label, energy_text(r), *map(number_text, numbers), ", ".join(r.gpu.throttle_reasons), others))
    columns = ("Configuration", "Energy/step", "SM MHz", "W", "Limit W", "<Throttled by", "<Other processes")
    return section("Energy and clocks", table_of(*columns, rows=rows))


def _verdict(verdict: VerdictRecord) -> tuple[RenderableType, ...]:
    more = _PREDICTED if predicted(verdict) else ()
    rows: list[tuple[str | Name, ...]] = []
    for g in verdict.gemms:
        even = MISSING if g.break_even_tokens is None else f"{g.break_even_tokens:,}"
        cells = [str(g.count), str(g.n), str(g.k), str(g.m), f"{g.flops / 1e9:.3g}", g.bound]
        cells += [gemm_text(g.gain), even] if more else []
        rows.append((Name(name=g.names[0]), *cells))
    table = table_of("Linear", "Count", "N", "K", "Tokens", "GFLOP", "<Bound by", *more, rows=rows)
    return (*section(f"Linears by shape: {verdict.title}", table), *note_list("Verdict", verdict.sentences))


def _changes(result: BenchResult) -> tuple[RenderableType, ...]:
    if not result.changes:
        return ()
    return section("Speed-up against the older document", table_of(*CHANGE_COLUMNS, rows=change_rows(result)))
