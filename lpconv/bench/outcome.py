"""Process the results of a bench: save after every row, compare with an older result, choose the exit code."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lpconv.bench.options import BenchOptions
from lpconv.bench.rows import FAILED, SKIPPED, TOO_LARGE
from lpconv.errors import LpconvError, ResourceError, UnsupportedError, VerificationError
from lpconv.gates import BENCH_GATES, check_rows
from lpconv.report.document import failed_gates
from lpconv.report.numbers import plural
from lpconv.results import BenchChange, BenchResult, BenchRow, GateRecord, RatioRecord, json_text, to_json
from lpconv.storage.contents import read_result
from lpconv.storage.partfile import write_small

REGRESSION, IMPROVEMENT, SAME, NEW = "regression", "improvement", "within the intervals", "not in the older result"
GONE = "only in the older result"


def compare_rows(rows: Sequence[BenchRow], old: BenchResult) -> tuple[BenchChange, ...]:
    """Compare rows with the same rows of an older result, by their ratios to the baseline.

    On a shared machine times of two runs are not comparable, but ratios to an interleaved baseline are. A change is a
    regression if its interval is entirely below the old one. Rows that only the older result has come last.
    """
    before = {r.key: r.ratio for r in old.rows if r.ratio and not r.is_baseline}
    pairs: list[tuple[BenchRow, RatioRecord | None, RatioRecord | None]]
    pairs = [(r, before.get(r.key), r.ratio) for r in rows if not r.is_baseline and r.ratio]
    measured = {r.key for r, _, _ in pairs}
    pairs += [(r, r.ratio, None) for r in old.rows if r.key in before and r.key not in measured]
    return tuple(
        BenchChange(name=f"{r.name}, {r.place}", before=earlier, after=now, change=_classify_change(earlier, now))
        for r, earlier, now in pairs
    )


def judge_of(options: BenchOptions) -> Callable[[BenchResult], BenchResult]:
    """A function that adds the gates and comparisons requested in `options` to a result.

    Both are read now, so that errors in them are raised before the work.
    """
    gates = tuple(map(BENCH_GATES.parse, options.gates))
    old = read_bench(Path(options.compare)) if options.compare else None

    def judged(result: BenchResult) -> BenchResult:
        changes = compare_rows(result.rows, old) if old else ()
        changes = tuple(c for c in changes if not (c.change == GONE and result.interrupted))  # other rows follow
        gone = [c.name for c in changes if c.change == GONE]
        lost = [GateRecord(expression=f"{g.expression} ({n})", value=None, passed=False) for g in gates for n in gone]
        return dataclasses.replace(result, gates=(*check_rows(gates, result.rows), *lost), changes=changes)

    return judged


def _classify_change(before: RatioRecord | None, after: RatioRecord | None) -> str:
    if before is None or after is None:
        return NEW if before is None else GONE
    if after.high < before.low:
        return REGRESSION
    return IMPROVEMENT if after.low > before.high else SAME


def final_error(result: BenchResult) -> LpconvError | None:
    """The error that the command should end with, or None; its details contain the whole result.

    Failed rows, gates and regressions come first (exit code 5), then rows that did not fit in memory (7). Skipped rows
    are an error (4) only if no other row besides the baseline was measured.
    """
    error = next(_errors(result), None)
    if error is not None:
        error.details["result"] = to_json(result)
    return error


def _errors(result: BenchResult) -> Iterator[LpconvError]:
    """The errors that a result calls for, most important first."""
    variants = [r for r in result.rows if not r.is_baseline]
    worse = [c.name for c in result.changes if c.change == REGRESSION]
    measured = "the other rows were measured and saved"
    if failed := [r for r in result.rows if r.status == FAILED]:
        yield VerificationError(f"{failed[0].name}: {failed[0].reason}", hint=measured)
    if gates := failed_gates(result.gates):
        yield VerificationError("; ".join(gates), hint="the table shows all measured values")
    if worse:
        yield VerificationError(
            f"slower than the older result: {'; '.join(worse)}", hint="the table shows what changed"
        )
    if result.changes and all(c.change in (NEW, GONE) for c in result.changes):
        yield VerificationError(
            "the older result has none of these rows, so nothing was compared",
            hint="use the model, sizes, processes, compile mode, baseline and device of the older run",
        )
    if large := [r for r in result.rows if r.status == TOO_LARGE]:
        text = f"{plural(len(large), 'row')} did not fit into memory; the first: {large[0].reason}"
        yield ResourceError(text, hint=measured)
    if variants and all(r.status == SKIPPED for r in variants):
        text = f"{variants[0].name}: {variants[0].reason}"
        yield UnsupportedError(text, hint="this was the only variant, so nothing was measured")


@contextmanager
def keep_results(
    path: Path | None, judge: Callable[[BenchResult], BenchResult], show_partial: Callable[[BenchResult], None]
) -> Iterator[Callable[[BenchResult], BenchResult]]:
    """Yields a function that judges each intermediate result, writes it to `path` if set, and returns it.

    If the block does not finish, the last result is passed to `show_partial`.
    """
    latest: list[tuple[BenchResult, float]] = []

    def keep(result: BenchResult) -> BenchResult:
        latest[:] = [(judge(result), time.monotonic())]
        if path is not None:
            write_small(path, json_text(latest[0][0]))
        return latest[0][0]

    try:
        yield keep
    except BaseException:  # including interrupts
        for partial, kept_s in latest:
            seconds = partial.seconds + time.monotonic() - kept_s
            show_partial(keep(dataclasses.replace(partial, seconds=seconds)))
        raise


def read_bench(path: Path) -> BenchResult:
    """Read a bench result from a file. Raises InputError if the file does not contain one."""
    return read_result(BenchResult, path, hint="pass a file written by `lpconv bench --save`")
