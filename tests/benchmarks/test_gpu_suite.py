"""`benchmarks/speed/gpu.py` on the CPU: its checks, its two files, and what it may import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_in_process import without_processes

from benchmarks.speed import gpu

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


def test_a_dry_run_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "dry"
    without_processes(monkeypatch)
    monkeypatch.setattr(gpu, "run_checks", lambda device: iter([gpu.Check(name="one", passed=True, detail="fine")]))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "-o", str(output)])

    assert gpu.main() == 0

    document = json.loads(output.with_suffix(".json").read_text())
    (run,) = document["runs"]
    assert {(r["method"], r["status"]) for r in run["rows"]} == {("plain", "ok"), ("static", "ok"), ("te", "skipped")}
    assert "| fp8 static | train | 1 x 32 |" in output.with_suffix(".md").read_text()


def test_it_imports_without_what_a_bare_machine_lacks() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import benchmarks.speed.gpu, lpconv.bench.worker"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
