"""A bench on the terminal: rows, memory by part, what the GPU said, Linears by shape, and the verdict last.

Import this module lazily: it loads rich.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.bench.text import COLUMNS, energy_text, gemm_text, memory_text, ratio_text
from lpconv.report.layout import Name, facts_grid, heading, note_list, section, table_of
from lpconv.report.numbers import MISSING, number_text, size_text
from lpconv.report.printable import printable_record
from lpconv.results import BenchResult, BenchRow, PeakRecord, VerdictRecord

__all__ = ["render_bench"]

# Columns that say something only where rows differ in them.
_OPTIONAL = ("Mode", "Batch", "Compiled", "Grad. err.", "Saved")


def render_bench(result: BenchResult) -> RenderableType:
    """Everything that was measured, and what it means."""
    result = printable_record(result)
    parts: list[RenderableType] = [*_head(result), _rows(result), *_reasons(result), *_memory(result), *_gpu(result)]
    for verdict in result.verdicts:
        parts += _verdict(verdict)
    return Group(*parts, *_changes(result), *_gates(result), *note_list("Notes", result.notes))


def _head(result: BenchResult) -> tuple[RenderableType, ...]:
    first = result.rows[0] if result.rows else None
    if first is None:
        return heading("No row was measured.")
    weights = f", {first.weights} weights" if first.weights else ""
    facts = {
        "Device": first.device,
        "Model": f"{first.model}, {first.layers} layers{weights}" if first.layers else first.model,
        "Baseline": ", ".join(dict.fromkeys(r.baseline for r in result.rows)),
    }
    if result.peaks is not None:
        facts["Measured peaks"] = _peaks(result.peaks)
    return (*heading("lpconv bench" + (" (interrupted)" if result.interrupted else "")), facts_grid(facts), Text())


def _peaks(peaks: PeakRecord) -> str:
    rates = {"bf16": peaks.bf16_flops, "fp32": peaks.fp32_flops, "fp8": peaks.fp8_flops}
    flops = [f"{name} {number_text(rate / 1e12)} TFLOP/s" for name, rate in rates.items() if rate is not None]
    return ", ".join([*flops, f"copies {peaks.bytes_per_s / 1e9:.1f} GB/s"])


def _rows(result: BenchResult) -> RenderableType:
    cells = {name: [cell(r) for r in result.rows] for name, cell in COLUMNS.items()}
    shown = [name for name in COLUMNS if name not in _OPTIONAL or len(set(cells[name])) > 1]
    table = table_of(*shown)
    for i in range(len(result.rows)):
        table.add_row(*(Text(cells[name][i]) for name in shown))
    return table


def _reasons(result: BenchResult) -> tuple[RenderableType, ...]:
    notes = [f"{_place(r)}: {r.status}, {r.reason}" for r in result.rows if r.reason]
    return note_list("Not measured", notes)


def _place(row: BenchRow) -> str:
    return f"{row.name}, {row.mode}, {row.batch} x {row.seq}"


def _memory(result: BenchResult) -> tuple[RenderableType, ...]:
    table = table_of("Configuration", "Peak", "<By part")
    for r in result.rows:
        if r.memory is not None:
            table.add_row(Text(_place(r)), Text(size_text(r.memory.peak_bytes)), Text(memory_text(r)))
    return section("Memory of tensors at the peak of a step", table)


def _gpu(result: BenchResult) -> tuple[RenderableType, ...]:
    watched = [r for r in result.rows if r.gpu is not None]
    if not watched:
        return section("Energy", Text("not available: there is no GPU, or nvidia-ml-py is not installed"))
    table = table_of("Configuration", "Energy/step", "SM MHz", "W", "Limit W", "<Throttled by", "<Other processes")
    for r in watched:
        assert r.gpu is not None
        numbers = (r.gpu.sm_clock_mhz, r.gpu.power_w, r.gpu.power_limit_w)
        others = ", ".join(map(str, r.gpu.foreign_processes))
        cells = [_place(r), energy_text(r), *map(number_text, numbers), ", ".join(r.gpu.throttle_reasons), others]
        table.add_row(*map(Text, cells))
    return section("Energy and clocks", table)


def _verdict(verdict: VerdictRecord) -> tuple[RenderableType, ...]:
    table = table_of("Linear", "Count", "N", "K", "Tokens", "GFLOP", "<Bound by", "fp8 gain", "Break-even")
    for g in verdict.gemms:
        even = MISSING if g.break_even_tokens is None else f"{g.break_even_tokens:,}"
        cells = [str(g.count), str(g.n), str(g.k), str(g.m), f"{g.flops / 1e9:.3g}", g.bound, gemm_text(g.gain), even]
        table.add_row(Name(name=g.names[0]), *map(Text, cells))
    return (
        *section(f"Linears by shape: {verdict.title}", table),
        *note_list("Verdict", verdict.sentences),
    )


def _changes(result: BenchResult) -> tuple[RenderableType, ...]:
    if not result.changes:
        return ()
    table = table_of("Configuration", "Before", "Now", "<Change")
    for c in result.changes:
        table.add_row(Text(c.name), Text(ratio_text(c.before)), Text(ratio_text(c.after)), Text(c.change))
    return section("Speed-up against the older document", table)


def _gates(result: BenchResult) -> tuple[RenderableType, ...]:
    notes = [f"{g.expression}: {'passed' if g.passed else 'failed'} with {number_text(g.value)}" for g in result.gates]
    return note_list("Gates", notes)
