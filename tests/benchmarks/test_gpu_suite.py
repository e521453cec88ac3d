"""`benchmarks/speed/gpu.py` on the CPU: its checks, its two files, and what it may import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.speed import gpu, gpu_kernels
from tests.helpers.bench_in_process import without_processes

# What a machine with nothing but torch, transformers, safetensors, numpy, typer and rich lacks.
ABSENT = ("psutil", "jinja2", "onnx", "accelerate", "datasets", "matplotlib", "pynvml", "torchao", "hypothesis")


@pytest.mark.parametrize("name", gpu.all_checks("cpu"))
def test_a_check_holds_on_the_cpu(name: str) -> None:
    passed, detail = gpu.all_checks("cpu")[name]()

    assert passed, detail


def test_a_check_that_raises_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[bool, str]:
        raise RuntimeError("image\nmore")

    monkeypatch.setattr(gpu, "all_checks", lambda device: {"broken": broken})

    (check,) = gpu.run_checks("cpu")

    assert check == gpu.Check(name="broken", passed=False, detail="RuntimeError: image")


def test_a_dry_run_writes_both_files_and_a_second_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "dry"
    row = gpu_kernels.Row(group="casts", name="cast", median_ms=2.0, quartiles_ms=(1.0, 3.0), least=8.0, share=0.5)
    without_processes(monkeypatch)
    monkeypatch.setattr(gpu, "run_checks", lambda device: iter([gpu.Check(name="one", passed=True, detail="fine")]))
    monkeypatch.setattr(gpu_kernels, "measure", lambda device, size: ({"copy": 8e12}, [row]))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "-o", str(output)])

    assert gpu.main() == 0

    document = json.loads(output.with_suffix(".json").read_text())
    (run,) = document["runs"].values()
    assert {(r["method"], r["status"]) for r in run["rows"]} == {("plain", "ok"), ("static", "ok"), ("te", "skipped")}
    page = output.with_suffix(".md").read_text()
    assert "| fp8 static | train | 1 x 32 |" in page
    assert "| cast | 2.000 | 1.000 to 3.000 | 0.50 |" in page

    for name in ("run_checks", "run_job"):
        monkeypatch.delattr(gpu, name)
    assert gpu.main() == 0
    again = json.loads(output.with_suffix(".json").read_text())
    assert {**again, "seconds": 0} == {**document, "seconds": 0}


def test_a_run_that_fails_is_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image\nmore")

    (row,) = gpu_kernels.timed("cpu", "casts", {"good": lambda: None, "bad": broken}, 8.0)

    assert row.name == "good"
    assert "bad" in capsys.readouterr().out


def test_it_imports_without_what_a_bare_machine_lacks() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import benchmarks.speed.gpu, lpconv.bench.worker"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
