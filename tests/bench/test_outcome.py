"""Gates, regressions and exit codes, from rows."""

import dataclasses
import json
from pathlib import Path

import pytest

from lpconv.bench.options import BenchOptions
from lpconv.bench.outcome import (
    GONE,
    IMPROVEMENT,
    NEW,
    REGRESSION,
    SAME,
    compare_rows,
    final_error,
    judge_of,
    keep_results,
)
from lpconv.bench.rows import TOO_LARGE
from lpconv.gates import BENCH_GATES, check_rows
from lpconv.results import BenchResult, BenchRow, from_json, json_text
from tests.helpers.bench_records import result, row


def judged(*rows: BenchRow, gate: str) -> BenchResult:
    return dataclasses.replace(result(*rows), gates=check_rows([BENCH_GATES.parse(gate)], rows))


@pytest.mark.parametrize(
    ("gate", "passes"),
    [
        ("speedup>=1.2", True), ("speedup_low>=1.25", False), ("peak_memory<=1000", True),
        ("gradient_error<0.05", False), ("tokens_per_s>=1e9", False),
    ],
)  # fmt: skip
def test_a_gate_judges_variants_only(gate: str, passes: bool) -> None:
    found = judged(row("plain"), row("static"), gate=gate)

    assert [g.passed for g in found.gates] == [passes]
    error = final_error(found)
    assert (error is None) == passes
    assert error is None or error.exit_code == 5


def test_a_row_without_figures_fails_its_gate_and_a_skipped_one_has_none() -> None:
    failed = row("mx", ratio=(1, 1, 1), status="failed", reason="it broke")
    bare = dataclasses.replace(failed, ratio=None)
    skipped = row("te", status="skipped", reason="not installed")

    found = judged(row("plain"), bare, skipped, gate="speedup>=1")

    assert [(g.passed, g.value) for g in found.gates] == [(False, None)]


@pytest.mark.parametrize(
    ("now", "change", "code"),
    [
        ((1.0, 0.9, 1.1), REGRESSION, 5),
        ((1.25, 1.1, 1.3), SAME, None),
        ((2, 1.9, 2.1), IMPROVEMENT, None),
    ],
)  # fmt: skip
def test_only_an_interval_that_lies_below_the_old_one_is_a_regression(
    now: tuple[float, float, float], change: str, code: int | None
) -> None:
    old, rows = result(row("plain"), row("static")), (row("plain"), row("static", ratio=now), row("mx"))

    changes = compare_rows(rows, old)

    assert [c.change for c in changes] == [change, NEW]  # which has no mx
    error = final_error(dataclasses.replace(result(*rows), changes=changes))
    assert (error and error.exit_code) == code


@pytest.mark.parametrize("changes", [{"batch": 4}, {"processes": 2, "parallel": "ddp"}])
def test_rows_of_another_size_or_number_of_processes_are_not_compared(changes: dict[str, object]) -> None:
    rows = [row("static", **changes)]

    found = compare_rows(rows, result(row("static")))

    assert [(c.before is None, c.after is None, c.change) for c in found] == [(True, False, NEW), (False, True, GONE)]
    error = final_error(dataclasses.replace(result(*rows), changes=found))
    assert error is not None
    assert "nothing" in error.message


@pytest.mark.parametrize(("status", "code"), [("failed", 5), (TOO_LARGE, 7), ("skipped", 4)])
def test_what_became_of_the_only_variant_decides_the_exit_code(status: str, code: int) -> None:
    error = final_error(result(row("plain"), row("static", status=status, reason="because")))

    assert error is not None
    assert error.exit_code == code
    assert "because" in error.message
    assert error.details["result"]


def test_a_skipped_row_beside_a_measured_one_is_no_error() -> None:
    assert final_error(result(row("plain"), row("static"), row("te", status="skipped", reason="no"))) is None


@pytest.mark.parametrize("gates", [(), ("speedup>=1",)])
@pytest.mark.parametrize("now", [(), (row("mx", status="skipped", reason="not installed"),)], ids=["gone", "skipped"])
def test_rows_that_only_the_older_result_has_are_listed_and_fail_gates(
    tmp_path: Path, gates: tuple[str, ...], now: tuple[BenchRow, ...]
) -> None:
    old = tmp_path / "old.json"
    old.write_text(json_text(result(row("plain"), row("static"), row("mx"))))
    now = tuple(dataclasses.replace(r, ratio=None) for r in now)
    judge = judge_of(BenchOptions(compare=str(old), gates=gates))
    found = judge(result(row("plain"), row("static"), *now))
    assert [c.change for c in found.changes] == [SAME, GONE]
    assert (final_error(found) is None) == (not gates)
    assert [g.passed for g in found.gates] == ([True, False] if gates else [])
    begun = judge(dataclasses.replace(found, interrupted=True))
    assert final_error(begun) is None, "the other rows follow"


def test_an_interrupted_bench_took_until_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 130.0, 130.0))
    monkeypatch.setattr("lpconv.bench.outcome.time.monotonic", lambda: next(clock))
    shown: list[BenchResult] = []

    def interrupted() -> None:
        with keep_results(tmp_path / "b.json", lambda r: r, shown.append) as keep:
            keep(dataclasses.replace(result(row("plain")), seconds=5.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [r.seconds for r in shown] == [35.0]
    assert from_json(BenchResult, json.loads((tmp_path / "b.json").read_text())).seconds == 35.0
