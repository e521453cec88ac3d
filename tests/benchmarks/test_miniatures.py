"""The miniature reproductions, at sizes for a test: each runs, leaves its files, and shows what does not need size."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common

pytest.importorskip("matplotlib", reason="figures need the [peers] extra")

ROOT = Path(__file__).parents[2]


def reproduce(script: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.reproduce.{script}", "--quick", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").stat().st_size > 10_000
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    found: dict[str, Any] = common.load(out / "results.json.xz")
    assert "--quick" in found["command"]
    return found


def test_unit(tmp_path: Path) -> None:
    found = reproduce("unit", tmp_path)
    errors = {
        (e["arithmetic"], e["power"]): e["median_error"] for e in found["gradient_errors"] if e["model"] == "llama"
    }
    assert errors["fp16", -30] == errors["fp8", -30] == 1
    assert errors["unit fp16", -30] == pytest.approx(errors["unit fp16", 10])
    assert errors["unit fp16", -30] < 0.002
    assert errors["unit fp8", -30] == pytest.approx(errors["unit fp8", 10], rel=0.05)
    smallest = {
        form: min(m["rms"] for m in found["magnitudes"] if m["form"] == form and m["direction"] == "gradient")
        for form in ("plain", "unit")
    }
    assert smallest["plain"] < 1e-3
    assert smallest["unit"] > 0.1


def test_scalify(tmp_path: Path) -> None:
    found = reproduce("scalify", tmp_path)
    assert max(e["median_error"] for e in found["gradient_errors"]) < 0.002
    losses = {run["arm"]: run["held_out_loss"][-1] for run in found["runs"]}
    assert losses["2: fp16 weights, rescaling"] == pytest.approx(losses["0: fp32"], abs=1e-3)
    assert losses["4: fp8 products, fp16 state"] == pytest.approx(losses["0: fp32"], abs=0.01)


def test_adaptive(tmp_path: Path) -> None:
    found = reproduce("adaptive", tmp_path)
    sigmoid = {s["scale"]: s for s in found["sweeps"] if s["model"] == "24 sigmoid layers"}
    assert min(s["zeroed"] for s in sigmoid.values() if s["power"] is not None and s["finite"]) > 0.1
    assert sigmoid["adaptive"]["zeroed"] < 0.005
    assert sigmoid["adaptive"]["worst_error"] < 0.05
    left = {run["scale"]: run["remaining"] for run in found["tasks"]}
    assert left["adaptive"][3] < 0.9 < min(left[s][3] for s in left if s not in ("adaptive", "fp32"))
