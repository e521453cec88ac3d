"""From rows to an exit code: changes against an older document, and what a script has to know in the end."""

from collections.abc import Sequence

from lpconv.bench.rows import FAILED, SKIPPED, TOO_LARGE
from lpconv.errors import LpconvError, ResourceError, UnsupportedError, VerificationError
from lpconv.report.numbers import plural
from lpconv.results import BenchChange, BenchResult, BenchRow, RatioRecord, to_json

__all__ = ["compare", "problem"]

REGRESSION, IMPROVEMENT, SAME, NEW = "regression", "improvement", "within the intervals", "not in the older document"


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


def problem(result: BenchResult) -> LpconvError | None:
    """The error that the command should end with, None where all is well; its details hold the whole result.

    Rows that failed, gates and regressions come first (exit code 5), then rows that did not fit (7). Rows that were
    skipped are an error (4) only where no other row is left beside the baseline.
    """
    found = _failure(result) or _too_large(result) or _nothing_left(result)
    if found is not None:
        found.details["result"] = to_json(result)
    return found


def _failure(result: BenchResult) -> LpconvError | None:
    failed = [r for r in result.rows if r.status == FAILED]
    gates = [g.expression for g in result.gates if not g.passed]
    worse = [c.name for c in result.changes if c.change == REGRESSION]
    if failed:
        return VerificationError(f"{failed[0].name}: {failed[0].reason}", hint="the other rows were measured and kept")
    if gates:
        return VerificationError(f"{plural(len(gates), 'gate')} failed: {'; '.join(gates)}", hint="see the table")
    if worse:
        return VerificationError(f"slower than before: {'; '.join(worse)}", hint="see the table of changes")
    if result.changes and all(c.change == NEW for c in result.changes):
        return VerificationError(
            "no row is in the older document, so nothing was compared",
            hint="pass the same model, sizes, processes, compile mode, baseline and device as then",
        )
    return None


def _too_large(result: BenchResult) -> LpconvError | None:
    rows = [r for r in result.rows if r.status == TOO_LARGE]
    if not rows:
        return None
    return ResourceError(
        f"{plural(len(rows), 'row')} did not fit; the first: {rows[0].reason}",
        hint="the other rows were measured and kept",
    )


def _nothing_left(result: BenchResult) -> LpconvError | None:
    variants = [r for r in result.rows if not r.is_baseline]
    if not variants or any(r.status != SKIPPED for r in variants):
        return None
    return UnsupportedError(f"{variants[0].name}: {variants[0].reason}", hint="nothing else was asked for")
