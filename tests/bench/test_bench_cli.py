"""`lpconv bench` as a user meets it, on the embedded model and without compiling."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.exc import InductorError
from typer.testing import CliRunner, Result

import lpconv.bench.run as bench_run
from lpconv.bench.options import Case
from lpconv.bench.rows import TOO_LARGE, BenchRun
from lpconv.bench.runner import CaseRunner
from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.errors import InputError
from lpconv.plan.options import ConvertOptions
from lpconv.results import PeakRecord
from tests.helpers.bench_in_process import without_processes

SHORT = ("--min-iters", "6", "--min-time", "0", "--rounds", "3", "--launches", "1")
QUICK = ("--layers", "2", "--compile", "off", "--baseline", "bf16", *SHORT, "-q")
PARAMETERS = 428_672  # of the demo's first two layers, embeddings included


@pytest.fixture(scope="module", autouse=True)
def wide_and_in_this_process() -> Iterator[None]:
    """Child processes take seconds to start; those of `test_parallel` and of the docs' commands are real."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        without_processes(patch)
        yield


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(a) for a in args)])


def refused(code: int, *args: object) -> str:
    result = run(*args)
    assert result.exit_code == code, result.output
    assert "hint: " in result.stderr
    return result.stderr


def with_high_peak(*, peaks: PeakRecord, **fields: Any) -> BenchRun:
    return BenchRun(peaks=replace(peaks, bf16_flops=1e13), **fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A training bench of three rows in two launches, and where it was saved.

    The peak in bf16 is no less than any step needs, because a busy machine may measure a lower one.
    """
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    what = ("--format", "bf16,fp8", "--method", "static,row", "--mode", "train", "--batch", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_run, "BenchRun", with_high_peak)
        result = run(
            "demo", *what, *QUICK, "--launches", "2", "--json", "--save", path, "--html", path.with_suffix(".html")
        )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), path


def test_every_row_says_what_it_is_relative_to(trained: tuple[dict[str, Any], Path]) -> None:
    document, _ = trained

    assert [(r["format"], r["method"]) for r in document["rows"]] == [
        ("bf16", "plain"), ("fp8", "static"), ("fp8", "row"),
    ]  # fmt: skip
    for row in document["rows"]:
        assert row["status"] == "ok"
        assert row["device"].endswith(("thread", "threads"))
        assert row["baseline"] == "bf16 eager"
        assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]
        assert row["peak_memory"] > 0
        assert row["emulated"] == (row["format"] == "fp8")
        assert row["recompiles"] == 0
        assert row["versions"]["torch"]
        assert row["command"]
        assert row["timing"]["num_samples"] >= 6
        assert (row["timing"]["num_launches"], row["timing"]["num_rounds"]) == (2, 4)
        assert len(row["round_medians_s"]) == 4
        assert row["energy"]["joules_per_step"] is None
        assert "no GPU" in row["energy"]["unavailable"]


def test_the_error_is_that_of_the_format(trained: tuple[dict[str, Any], Path]) -> None:
    bf16, static, by_row = trained[0]["rows"]

    assert bf16["numerics"]["output_error"] < 0.02
    for row in (static, by_row):
        assert 0.01 < row["numerics"]["output_error"] < 0.15
        assert 0.02 < row["numerics"]["gradient_error"] < 0.4


@pytest.mark.parametrize("how", [{"format": "e4m3fn"}, {"budget_bits": 4.0}], ids=str)
def test_the_codes_of_a_checkpoint_are_measured_as_they_are(how: dict[str, Any], tmp_path: Path) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(method="unit", verify="none", **how))
    result = run(tmp_path / "out", "--format", "codes", *QUICK, "--batch", "1", "--json")
    assert result.exit_code == 0, result.output
    base, codes = json.loads(result.stdout)["rows"]
    assert (codes["format"], codes["compiled"], codes["emulated"], codes["layers"]) == ("codes", "off", True, 2)
    assert codes["memory"]["parts"]["weights"] < 0.75 * base["memory"]["parts"]["weights"]  # vectors are no codes
    assert 0 < codes["numerics"]["output_error"] < 0.02  # of bf16 arithmetic alone: the fp32 model has these weights


@pytest.mark.parametrize("args", [("--mode", "train"), ()])
def test_codes_do_not_train_and_a_plain_model_has_none(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "demo"
    if args:
        convert("demo", tmp_path / "out", ConvertOptions(method="unit", format="e4m3fn", verify="none"))
        model = str(tmp_path / "out")
    monkeypatch.setattr("lpconv.bench.run.Child", None)  # no process is started
    assert ("trained" if args else "`demo`") in refused(4, model, "--format", "codes", *QUICK, *args)


def test_the_parts_of_memory_sum_to_the_peak(trained: tuple[dict[str, Any], Path]) -> None:
    for row in trained[0]["rows"]:
        parts = row["memory"]["parts"]
        assert sum(parts.values()) == pytest.approx(row["peak_memory"], rel=0.1)
        assert parts["weights"] >= 2 * PARAMETERS * 0.99  # in bf16
        assert parts["optimizer"] >= 4 * PARAMETERS * 0.99  # two moments of AdamW in bf16


def test_on_a_cpu_the_verdict_says_that_fp8_is_emulated(trained: tuple[dict[str, Any], Path]) -> None:
    (verdict,) = trained[0]["verdicts"]

    assert any("emulates fp8" in s for s in verdict["sentences"])
    assert all(g["gain"] is None and g["flops"] > 0 for g in verdict["gemms"])


def test_what_was_saved_is_shown_again(trained: tuple[dict[str, Any], Path]) -> None:
    _, path = trained

    shown = CliRunner().invoke(app, ["report", str(path)])
    saved = json.loads(path.read_text())

    assert shown.exit_code == 0, shown.output
    assert "fp8 static" in shown.stdout
    assert saved["interrupted"] is False
    assert "fp8 static" in path.with_suffix(".html").read_text()


def test_what_was_saved_is_compared_with(trained: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    document, _ = trained
    for row in document["rows"]:
        row["ratio"] = {"value": 1e6, "low": 1e5, "high": 1e7}  # nothing is as fast as this
    old = tmp_path / "old.json"
    old.write_text(json.dumps(document))

    compared = run("demo", "--mode", "train", "--batch", "1", *QUICK[:-1], "--compare", old)

    assert compared.exit_code == 5
    assert ": fp8 static, train, 1 x 128" in compared.stderr
    assert "regression" in compared.stdout


def test_a_bench_goes_on_behind_what_does_not_fit_and_what_is_missing() -> None:
    result = run(
        "demo", "--method", "te,static", "--batch", "100000000,1", "--seq", "32", *QUICK, "--json"
    )  # fmt: skip

    assert result.exit_code == 7, result.output
    assert re.search(r"\d [A-Z]B", result.stderr)
    rows = json.loads(result.stdout)["error"]["details"]["result"]["rows"]
    assert [(r["batch"], r["method"], r["status"]) for r in rows] == [
        (100_000_000, "plain", TOO_LARGE), (100_000_000, "te", TOO_LARGE), (100_000_000, "static", TOO_LARGE),
        (1, "plain", "ok"), (1, "te", "skipped"), (1, "static", "ok"),
    ]  # fmt: skip
    assert rows[0]["estimate_bytes"] > 1e12
    assert "transformer-engine" in rows[4]["reason"]


def test_a_baseline_that_fails_fails_its_rows_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runner: CaseRunner, steps: int) -> None:
        if runner.case.batch == 1:
            raise InductorError(RuntimeError("no compiler"), None)

    monkeypatch.setattr("torch.nn.Module.compile", lambda module, **settings: None)
    monkeypatch.setattr("lpconv.bench.runner.CaseRunner.run", broken)
    compiled = ("--compile", "blocks", "--baseline", "bf16+compile")
    result = run("demo", "--batch", "1,2", "--seq", "16", *QUICK, *compiled, "--json")

    assert result.exit_code == 5, result.output
    rows = json.loads(result.stdout)["error"]["details"]["result"]["rows"]
    assert [(r["batch"], r["status"]) for r in rows] == [(1, "failed"), (1, "failed"), (2, "ok"), (2, "ok")]
    assert "--compile off" in rows[0]["reason"]


def test_a_model_that_is_no_longer_read_ends_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it goes once the baseline has been built. What was measured before is in the file."""
    saved, build = tmp_path / "bench.json", CaseRunner.__init__

    def damaged(runner: CaseRunner, case: Case, *, memory_share: float) -> None:
        if case.batch == 2 and case.method == "static":
            raise InputError("`model.safetensors` is shorter than its header says", hint="download it again")
        build(runner, case, memory_share=memory_share)

    monkeypatch.setattr("lpconv.bench.runner.CaseRunner.__init__", damaged)

    said = refused(3, "demo", "--method", "static", "--batch", "1,2", "--seq", "16", *QUICK, "--save", saved)

    assert "shorter" in said
    document = json.loads(saved.read_text())
    assert [(r["batch"], r["status"]) for r in document["rows"]] == [(1, "ok"), (1, "ok")]


def test_an_interrupted_run_keeps_the_rows_it_has(tmp_path: Path) -> None:
    saved, command = tmp_path / "bench.json", [sys.executable, "-m", "lpconv", "bench", "demo"]
    sizes = ("--format", "bf16", "--batch", "1,2,3,4,5,6,7,8", "--seq", "16")  # the baseline alone: a child for each
    process = subprocess.Popen(
        [*command, *sizes, *QUICK[:-1], "--save", str(saved)],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )
    while not saved.exists():
        assert process.poll() is None
        time.sleep(0.1)

    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    assert b"interrupted" in stdout
    document = json.loads(saved.read_text())
    assert document["interrupted"]
    assert document["rows"][0]["status"] == "ok"


@pytest.mark.parametrize(
    ("code", "args"),
    [
        (2, ("demo", "--format", "fp9")),
        (2, ("demo", "--gate", "speed>=1")),
        (2, ("demo", "--batch", "0")),
        (2, ("demo", "--baseline", "bf15")),
        (2, ("demo", "--layers", "5")),
        (3, ("demo", "--compare", "no-such.json")),
        (2, ("demo", "--device", "tpu")),
        (2, ("demo", "--parallel", "ddp")),
        (2, ("demo", "--format", "")),
        (4, ("demo", "--device", "cuda")),
        (4, ("demo", "--compile", "graphs", "--device", "cpu")),
    ],
)
def test_bad_requests_end_with_their_code_and_a_hint(code: int, args: tuple[str, ...]) -> None:
    refused(code, *args, "-q")


@pytest.mark.parametrize("flag", ["--min-iters", "--rounds", "--launches"])
def test_an_effort_of_zero_is_refused_by_its_flag(flag: str) -> None:
    assert f"{flag} 0 " in refused(2, "demo", flag, 0)
