"""Two processes that torchrun starts train what one does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import cli_environment

from lpconv.errors import UnsupportedError, UsageError
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune

RUN = ["finetune", "demo", "--steps", "3", "--batch-size", "4", "--seq-len", "32", "--eval-batches", "2", "--twin",
       "none", "--track-every", "0", "--clip", "0.5", "-q"]  # fmt: skip


def run(launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *launcher, *RUN, *arguments]
    return subprocess.run(
        command, env=cli_environment(LPCONV_COMPILE="never"), capture_output=True, text=True, check=False
    )


def first_run(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["runs"][0]
    return found


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lpconv"]
    assert run(["lpconv"], "--recipe", "fp32", "-o", str(one)).returncode == 0
    done = run(torchrun, "--recipe", "fp32", "-o", str(two))
    assert done.returncode == 0, done.stderr
    for figure in ("losses", "evaluations"):
        a, b = (first_run(folder)[figure] for folder in (one, two))
        values = [x["values"] if figure == "losses" else x[0]["values"] for x in (a, b)]
        assert values[0] == pytest.approx(values[1], rel=2e-6)  # sums in another order
    assert len((two / "metrics.jsonl").read_text().splitlines()) == 3


def test_scaled_gradients_are_not_averaged_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.train.run.num_processes", lambda: 2)
    for recipe in ("unit-fp8", "adaptive-fp16"):
        with pytest.raises(UnsupportedError, match="torch averages plain gradients"):
            finetune("demo", tmp_path / "run", FinetuneOptions(arithmetic=arithmetic(recipe=recipe)))
    with pytest.raises(UsageError, match="does not divide"):
        finetune("demo", tmp_path / "run", FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), batch_size=3))
