"""Batches by submitit, on its cluster of processes on this machine; skipped where submitit is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import cli_environment
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.data import demo_checkpoint

try:
    import submitit  # noqa: F401
except ImportError:
    has_submitit = False
else:
    has_submitit = True


def manifest(folder: Path) -> Path:
    path = folder / "jobs.json"
    jobs = [{"id": "a", "split": 2, "max_shard_size": "1MB"}, {"id": "bad", "gates": "sqnr>=200"},
            {"id": "never", "model": "job:bad"}]  # fmt: skip
    defaults = {"model": str(demo_checkpoint()), "verify": "weights", "workers": 1}
    path.write_text(json.dumps({"version": 1, "defaults": defaults, "jobs": jobs}))
    return path


@pytest.mark.skipif(not has_submitit, reason="submitit is not installed: pip install 'lpconv[slurm]'")
def test_a_batch_by_submitit(tmp_path: Path) -> None:
    command = ["batch", str(manifest(tmp_path)), "--json", "--keep-going", "--executor", "slurm", "--address", "local"]
    environment = cli_environment(PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run(
        [sys.executable, "-m", "lpconv", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 6, done.stderr
    jobs = json.loads(done.stdout)["error"]["details"]["jobs"]
    assert {job["id"]: job["status"] for job in jobs} == {"a": "converted", "bad": "failed", "never": "not run"}
    assert jobs[1]["error"]["code"] == 5
    assert "bad: error: verification failed" in done.stderr


@pytest.mark.parametrize("has_it", [False, True])
def test_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    monkeypatch.setitem(sys.modules, "submitit", sys if has_it else None)
    monkeypatch.setenv("PATH", "")
    done = CliRunner().invoke(app, ["batch", str(manifest(tmp_path)), "--executor", "slurm"])
    assert done.exit_code == 4
    assert ("no command `sbatch`" if has_it else "lpconv[slurm]") in done.stderr
