"""Conditions on rows, such as ``speedup>=1.2``, and changes against an older document."""

from collections.abc import Callable, Sequence

from lpconv.convert.gates import Gate, parse_gate
from lpconv.results import BenchChange, BenchResult, BenchRow, GateRecord, RatioRecord

__all__ = ["METRICS", "NEW", "REGRESSION", "check_gates", "compare", "parse_gates"]

REGRESSION, IMPROVEMENT, SAME, NEW = "regression", "improvement", "within the intervals", "not in the older document"

METRICS: dict[str, Callable[[BenchRow], float | None]] = {
    "speedup": lambda r: r.ratio.value if r.ratio else None,
    "speedup_low": lambda r: r.ratio.low if r.ratio else None,
    "tokens_per_s": lambda r: r.tokens_per_s,
    "peak_memory": lambda r: r.peak_memory,
    "saved_memory": lambda r: r.memory.saved_bytes if r.memory else None,
    "output_error": lambda r: r.numerics.output_error if r.numerics else None,
    "gradient_error": lambda r: r.numerics.gradient_error if r.numerics else None,
}


def parse_gates(texts: Sequence[str]) -> tuple[Gate, ...]:
    """The gates of a command line; UsageError with what is wrong."""
    return tuple(parse_gate(text, METRICS, "speedup>=1.2") for text in texts)


def check_gates(gates: Sequence[Gate], rows: Sequence[BenchRow]) -> tuple[GateRecord, ...]:
    """Every gate on every row but the baselines and those skipped; a row that failed fails its gates."""
    judged = [r for r in rows if not r.is_baseline and r.status != "skipped"]
    return tuple(_of_row(g.check(METRICS[g.metric](r)), r) for g in gates for r in judged)


def _of_row(record: GateRecord, row: BenchRow) -> GateRecord:
    return GateRecord(
        expression=f"{record.expression} ({row.name}, {row.place})", value=record.value, passed=record.passed
    )


def compare(rows: Sequence[BenchRow], old: BenchResult) -> tuple[BenchChange, ...]:
    """Rows against the same rows of an older document, by their ratios to the baseline.

    Times of two runs on a machine that others use cannot be compared, ratios to a baseline measured in turn can. A
    regression is an interval that lies entirely below the old one.
    """
    before = {r.key: r.ratio for r in old.rows if r.ratio and not r.is_baseline}
    pairs = [(r, before.get(r.key), r.ratio) for r in rows if not r.is_baseline and r.ratio]
    return tuple(
        BenchChange(name=f"{r.name}, {r.place}", before=earlier, after=now, change=_change(earlier, now))
        for r, earlier, now in pairs
    )


def _change(before: RatioRecord | None, after: RatioRecord) -> str:
    if before is None:
        return NEW
    if after.high < before.low:
        return REGRESSION
    return IMPROVEMENT if after.low > before.high else SAME
