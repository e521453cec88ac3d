"""Batches on a real Ray cluster of two node processes on this machine; skipped where Ray is not installed."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from tests.helpers.checkpoints import cli_environment, files_of

try:
    import ray  # noqa: F401
except ImportError:
    has_ray = False
else:
    has_ray = True
_PORT = 6399
needs_ray = pytest.mark.skipif(not has_ray, reason="Ray is not installed: pip install 'lpconv[ray]'")


@contextlib.contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[tuple[str, list[psutil.Process]]]:
    """A head without cores, and nodes of one core each: the address, and the nodes' processes."""
    folder.mkdir(parents=True, exist_ok=True)
    # Ray would leave a token in the home directory, and say who uses it.
    os.environ |= {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    address = f"127.0.0.1:{_PORT}"
    os.environ |= {"RAY_raylet_start_wait_time_s": "180"}  # of a machine that is busy
    common = ["--block", "--disable-usage-stats", "--object-store-memory", str(100 * 2**20)]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    head = [*start, "--head", "--port", str(_PORT), "--num-cpus", "0", "--include-dashboard", "false", *common]
    begun: list[psutil.Process] = []
    try:
        _begin(head, folder / "head.log", begun)
        for number in range(nodes):
            node = [*start, "--address", address, "--num-cpus", "1", *common]
            _begin(node, folder / f"node{number}.log", begun)
        yield address, begun[1:]
    finally:
        for process in reversed(begun):
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def _begin(command: Sequence[str], log: Path, begun: list[psutil.Process]) -> None:
    """Begin one of the cluster's processes, and wait until it says that it is there."""
    with log.open("ab") as f:
        process = psutil.Popen(command, stdout=f, stderr=f, start_new_session=True)
    begun.append(process)
    _wait_for(lambda: b"runtime started" in log.read_bytes() or process.poll() is not None)
    if process.poll() is not None:
        raise RuntimeError(log.read_text())


def _wait_for(condition: Any, patience_s: float = 180.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the cluster does not begin")
        time.sleep(0.2)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[psutil.Process]]]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, os.environ.get(name, ""))  # so that they are put back
        with cluster(tmp_path_factory.mktemp("cluster"), 2) as both:
            yield both


@pytest.fixture
def address(nodes: tuple[str, list[psutil.Process]]) -> str:
    return nodes[0]


def manifest(folder: Path, *jobs: dict[str, Any]) -> Path:
    path = folder / "jobs.json"
    defaults = {"model": str(demo_checkpoint()), "verify": "weights", "workers": 1, "max_shard_size": "300KB"}
    path.write_text(json.dumps({"version": 1, "defaults": defaults, "jobs": list(jobs)}))
    return path


def batch(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lpconv", "batch", str(path), "--json", *arguments],
        env=cli_environment() | {n: v for n, v in os.environ.items() if n.startswith(("RAY_", "PYTHONPATH", "HOME"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@needs_ray
def test_a_batch_on_two_nodes(tmp_path: Path, address: str) -> None:
    path = manifest(tmp_path, {"id": "a"}, {"id": "b", "format": "e4m3fn", "split": 2}, {"id": "c", "model": "job:a"})
    process = batch(path, "--executor", "ray", "--address", address)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert {job["id"]: job["status"] for job in json.loads(out)["jobs"]} == dict.fromkeys("abc", "converted")
    lock, outputs = (tmp_path / "jobs.lock.json").read_bytes(), {j: files_of(tmp_path / "out" / j) for j in "abc"}
    (tmp_path / "out").rename(tmp_path / "placed")
    alone = batch(path)
    _, err = alone.communicate()
    assert alone.returncode == 0, err
    assert {j: files_of(tmp_path / "out" / j) for j in "abc"} == outputs
    assert (tmp_path / "jobs.lock.json").read_bytes() == lock


@needs_ray
def test_a_gpu_that_nobody_has(tmp_path: Path, address: str) -> None:
    process = batch(manifest(tmp_path, {"id": "a", "gpus": 1}), "--executor", "ray", "--address", address)
    out, _ = process.communicate()
    assert process.returncode == 4
    assert json.loads(out)["error"]["details"]["job"] == "a"
    assert not (tmp_path / "out").exists()


@needs_ray
def test_ctrl_c_ends_what_runs_and_resume_goes_on(tmp_path: Path, address: str) -> None:
    steps = {"kind": "finetune", "steps": 300, "seq_len": 32, "batch_size": 2, "eval_batches": 1, "twin": "none"}
    path = manifest(tmp_path, {"id": "long", "recipe": "fp32", **steps}, {"id": "b", "needs": "long"})
    on_ray = ("--executor", "ray", "--address", address)
    process = batch(path, *on_ray)
    while not (tmp_path / "out/long/metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    out, err = batch(path, *on_ray, "--resume").communicate()
    assert {job["status"] for job in json.loads(out)["jobs"]} == {"trained", "converted"}, err


@needs_ray
def test_jobs_of_a_node_that_dies_go_on_elsewhere(tmp_path: Path, nodes: tuple[str, list[psutil.Process]]) -> None:
    """The last test: the cluster has one node less afterwards."""
    steps = {"kind": "finetune", "steps": 40, "seq_len": 32, "batch_size": 2, "eval_batches": 1, "twin": "none"}
    path = manifest(tmp_path, *({"id": f"t{i}", "recipe": "fp32", **steps} for i in range(2)))
    process = batch(path, "--executor", "ray", "--address", nodes[0])
    while not all((tmp_path / f"out/t{i}/metrics.jsonl").exists() for i in range(2)):
        assert process.poll() is None
        time.sleep(0.2)
    next(c for c in nodes[1][1].children(recursive=True) if c.name() == "raylet").kill()
    out, err = process.communicate()
    assert [job["status"] for job in json.loads(out)["jobs"]] == ["trained"] * 2, err
    assert err.count("; once") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--executor", "rya"], 2, "`ray`"),
        (["--address", "127.0.0.1:1"], 2, "add --executor ray"),
        pytest.param(
            ["--executor", "ray"], 4, "lpconv[ray]", marks=pytest.mark.skipif(has_ray, reason="Ray is installed")
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    done = CliRunner().invoke(app, ["batch", str(manifest(tmp_path, {"id": "a"})), *arguments])
    assert (done.exit_code, says in done.stderr) == (code, True), done.stderr
