"""The words that all reports of a bench share, and the columns of its tables."""

import dataclasses
from collections.abc import Callable, Sequence

from lpconv.report.numbers import MISSING, number_text, share_text, size_text
from lpconv.results import BenchResult, BenchRow, PeakRecord, RatioRecord, VerdictRecord


def ratio_text(ratio: RatioRecord | None) -> str:
    """1.23 [1.20, 1.26]."""
    return MISSING if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def best_speed(rows: Sequence[BenchRow]) -> tuple[str, BenchRow] | None:
    """The variant with the best ratio to its baseline, and what it is called: below 1 nothing is the fastest."""
    compared = [(r.ratio.value, i) for i, r in enumerate(rows) if r.ratio and not r.is_baseline and r.status == "ok"]
    if not compared:
        return None
    ratio, index = max(compared)
    return ("fastest" if ratio > 1 else "slower here"), rows[index]


def headline(result: BenchResult) -> str:
    """Whether anything was faster than its baseline, in a few words."""
    best = best_speed(result.rows)
    if best is None:
        return "no row was compared"
    return f"{best[0]}: {best[1].name}, {ratio_text(best[1].ratio)} times the baseline's speed"


def gemm_text(gain: float | None) -> str:
    """A predicted gain; a dash where nothing is predicted."""
    return MISSING if gain is None else f"{gain:.2f}"


def processes_text(row: BenchRow) -> str:
    """2, ddp: what is one process's and what is of all."""
    return f"{row.processes}, {row.parallel}; batch and memory are those of one, tokens/s of all"


def peaks_text(peaks: PeakRecord) -> str:
    """Rates of products and copies."""
    rates = {"bf16": peaks.bf16_flops, "fp32": peaks.fp32_flops, "fp8": peaks.fp8_flops}
    flops = [f"{name} {number_text(rate / 1e12)} TFLOP/s" for name, rate in rates.items() if rate is not None]
    return ", ".join([*flops, f"copies {peaks.bytes_per_s / 1e9:.1f} GB/s"])


def labels(rows: Sequence[BenchRow]) -> list[str]:
    """What to call each row: its name, with mode and sizes where rows differ in them."""
    alike = len({r.place for r in rows}) == 1
    return [r.name if alike else f"{r.name}, {r.place}" for r in rows]


def reasons(rows: Sequence[BenchRow]) -> list[str]:
    """Why rows have no figures, rows of one reason together."""
    found: dict[str, list[str]] = {}
    for label, r in zip(labels(rows), rows, strict=True):
        if r.reason:
            found.setdefault(f"{r.status}, {r.reason}", []).append(label)
    return [f"{'; '.join(names)}: {reason}" for reason, names in found.items()]


def notes(result: BenchResult) -> tuple[str, ...]:
    """What a reader must know, and that weights are not all the checkpoint's where that is so."""
    partly = dict.fromkeys((r.model, r.weights.partition(",")[0]) for r in result.rows if "random, else" in r.weights)
    drawn = (f"{model}: {words}, so errors of outputs and gradients are not its own" for model, words in partly)
    return (*drawn, *result.notes)


def _step_text(seconds: float) -> str:
    """A time with three significant digits: 430 µs, 19.2 ms, 1.25 s."""
    unit, scale = next((u for u in (("s", 1.0), ("ms", 1e3)) if seconds * u[1] >= 0.9995), ("µs", 1e6))
    return f"{number_text(seconds * scale)} {unit}"


def _error_text(error: float | None) -> str:
    return MISSING if error is None else share_text(error, 1)


def predicted(verdict: VerdictRecord) -> bool:
    """Whether the roofline says anything about fp8: not where it is emulated."""
    return any(g.gain is not None for g in verdict.gemms)


def energy_text(row: BenchRow) -> str:
    """Joules per step, or why there are none."""
    if row.energy is None or row.energy.joules_per_step is None:
        return "not available"
    return f"{row.energy.joules_per_step:.3g} J"


def memory_text(row: BenchRow) -> str:
    """The parts of the peak in per cent."""
    if row.memory is None:
        return MISSING
    parts, whole = dataclasses.asdict(row.memory.parts), row.memory.parts.total
    return ", ".join(f"{name} {share_text(size, whole)}" for name, size in parts.items() if size)


# Heading and cell of each column of a table.
COLUMNS: dict[str, Callable[[BenchRow], str]] = {
    "Configuration": lambda r: r.name,
    "Mode": lambda r: r.mode,
    "Batch": lambda r: f"{r.batch} x {r.seq}",
    "Compiled": lambda r: r.compiled,
    "Step": lambda r: _step_text(r.timing.median_s) if r.timing else r.status,
    "Tokens/s": lambda r: f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else MISSING,
    "Speed-up": lambda r: "baseline" if r.is_baseline else ratio_text(r.ratio),
    "Peak": lambda r: size_text(r.peak_memory),
    "Saved": lambda r: size_text(r.memory.saved_bytes if r.memory and r.mode == "train" else None),
    "Output err.": lambda r: _error_text(r.numerics.output_error if r.numerics else None),
    "Grad. err.": lambda r: _error_text(r.numerics.gradient_error if r.numerics else None),
    "Emulated": lambda r: ("yes" if r.emulated else "no") if r.status == "ok" else MISSING,
}


CHANGE_COLUMNS = ("Configuration", "Before", "Now", "<Change")


def change_rows(result: BenchResult) -> list[tuple[str, ...]]:
    """What an older document had for the same rows, under `CHANGE_COLUMNS`."""
    return [(c.name, ratio_text(c.before), ratio_text(c.after), c.change) for c in result.changes]
