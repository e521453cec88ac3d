"""A batch on a real Ray cluster of node processes on this machine, beside the same batch without Ray.

    python -m benchmarks.attack.ray_batch --work DIRECTORY --out FILE.json

A manifest of 24 conversions, two of them split, and 6 fine-tunings runs

- `alone`: one job after another in one process;
- `parallel`: with --parallel 2;
- `ray`: on a cluster of a head without cores and two nodes of one core each, begun with `ray start`;
- `killed`: the same, where the raylet of one node gets a SIGKILL once a third of the jobs are done.

Outputs and lock have to be those of `alone`, but for records of time and memory. `by hand` are some conversions typed
one after another, and `one by one` the same on Ray, at most one at a time: the difference is what placing a job costs.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.attack.kills import comparable
from lpconv.data import demo_checkpoint

_LPCONV = (sys.executable, "-m", "lpconv")
_PORT = 6399
_TUNE = {"kind": "finetune", "steps": 2, "seq_len": 32, "batch_size": 2, "eval_batches": 1, "twin": "none"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to run the batch. `differing` are files and lock entries that are not those of the first way."""

    name: str
    seconds: float
    exit_code: int
    done: int
    placed_again: int = 0
    differing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()


def write_manifest(folder: Path) -> Path:
    """24 conversions and 6 fine-tunings of the demo model."""
    folder.mkdir(parents=True)
    shutil.copytree(demo_checkpoint(), folder / "model")
    forms: list[dict[str, Any]] = [
        {"format": "fp16"}, {"format": "e4m3fn"}, {"format": "e5m2"}, {"method": "collage"},
        {"method": "scalify", "format": "e4m3fn"}, {"format": "e4m3fn", "granularity": "row"},
        {"method": "collage", "residual": "int8"}, {"format": "bf16"},
    ]  # fmt: skip
    jobs = [
        {"id": f"c{i:02d}", "max_shard_size": f"{200 + 50 * (i // 8)}KB", **forms[i % 8]}
        | ({"split": 3} if i in (5, 14) else {})
        for i in range(24)
    ]
    recipes = ("fp32", "collage-bf16", "amp-bf16")
    jobs += [{"id": f"t{i}", "recipe": recipes[i % 3], "model": f"job:c{i:02d}", **_TUNE} for i in range(6)]
    path = folder / "jobs.json"
    defaults = {"model": "./model", "verify": "weights", "workers": 1}
    path.write_text(json.dumps({"version": 1, "defaults": defaults, "jobs": jobs}))
    return path


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


def _raylet(process: psutil.Process) -> psutil.Process | None:
    return next((c for c in process.children(recursive=True) if c.name() == "raylet"), None)


def _wait_for(condition: Any, patience_s: float = 180.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the cluster does not begin")
        time.sleep(0.2)


def run_batch(
    work: Path, name: str, arguments: Sequence[str], victim: psutil.Process | None = None
) -> tuple[Run, dict[str, Any]]:
    """The batch in a folder of its own; `victim` loses its raylet after a third of the jobs."""
    manifest = write_manifest(work / "batch")  # the same place for all: a fine-tuning records where its model lay
    lock = manifest.with_name("jobs.lock.json")
    started = time.monotonic()
    with (work / f"{name}.err").open("w") as err:
        process = subprocess.Popen(
            [*_LPCONV, "batch", str(manifest), "--json", *arguments], stdout=subprocess.PIPE, stderr=err, text=True
        )
        if victim is not None:
            _wait_for(lambda: lock.exists() and lock.read_text().count('"id"') >= 10, 1800)
            raylet = _raylet(victim)
            assert raylet is not None
            raylet.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
    seconds = time.monotonic() - started
    document = json.loads(out)
    jobs = (document.get("error", {}).get("details") or document)["jobs"]
    print(f"{name}: {seconds:.0f} s, exit {process.returncode}", file=sys.stderr)
    found = {job["id"]: comparable(manifest.parent / "out" / job["id"]) for job in jobs}
    left_over = tuple(p.name for p in (manifest.parent / "out").iterdir() if p.name not in found)
    found["lock"] = json.loads(lock.read_text())
    manifest.parent.rename(work / name)
    run = Run(
        name=name,
        seconds=round(seconds, 1),
        exit_code=process.returncode,
        done=sum(job["status"] in ("converted", "trained") for job in jobs),
        placed_again=(work / f"{name}.err").read_text().count("; once more"),
        left_over=left_over,
    )
    return run, found


def _differing(found: dict[str, Any], expected: dict[str, Any]) -> tuple[str, ...]:
    wrong = [
        f"{job}/{name}"
        for job, files in expected.items()
        for name in {*files, *found[job]}
        if files.get(name) != found[job].get(name)
    ]
    return tuple(sorted(wrong))


def _by_hand(work: Path, count: int) -> float:
    """Median seconds of a conversion that is typed."""
    times = []
    for i in range(count):
        started = time.monotonic()
        command = [*_LPCONV, "convert", str(demo_checkpoint()), "--verify", "weights", "--workers", "1", "-q"]
        subprocess.run([*command, "-o", str(work / f"hand{i}")], check=True, stdout=subprocess.DEVNULL)
        times.append(time.monotonic() - started)
    return statistics.median(times)


def _one_by_one(work: Path, address: str, count: int) -> tuple[float, float]:
    """Seconds of a conversion on Ray, and those of a batch whose jobs are all done, which it takes to connect."""
    folder = work / "one-by-one"
    folder.mkdir()
    given = {"model": str(demo_checkpoint()), "workers": 1, "verify": "weights"}
    jobs = [{"id": f"j{i}", **given} for i in range(count)]
    (folder / "jobs.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    on_ray = ["--executor", "ray", "--address", address, "--parallel", "1", "--resume", "-q"]
    took = []
    for _ in range(2):
        started = time.monotonic()
        subprocess.run([*_LPCONV, "batch", str(folder / "jobs.json"), *on_ray], check=True, stdout=subprocess.DEVNULL)
        took.append(time.monotonic() - started)
    return (took[0] - took[1]) / count, took[1]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--ways", default="ray,killed,parallel", help="beside `alone`")
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    import ray

    first, expected = run_batch(asked.work, "alone", [])
    runs = [first]
    with cluster(asked.work / "cluster", 2) as (address, nodes):
        hand_s = _by_hand(asked.work, asked.count)
        placed_s, connecting_s = _one_by_one(asked.work, address, asked.count)
        overhead = {
            "count": asked.count,
            "by_hand_s": round(hand_s, 2),
            "on_ray_one_by_one_s": round(placed_s, 2),
            "ratio": round(placed_s / hand_s, 3),
            "connecting_s": round(connecting_s, 2),
        }
        on_ray = ["--executor", "ray", "--address", address]
        ways = {"ray": (on_ray, None), "killed": (on_ray, nodes[1]), "parallel": (["--parallel", "2"], None)}
        for name in asked.ways.split(","):
            run, found = run_batch(asked.work, name, *ways[name])
            runs.append(Run(**asdict(run) | {"differing": _differing(found, expected)}))
            result = {
                "command": common.command(),
                "ray": ray.__version__,
                "cores": os.cpu_count(),
                "load_average": os.getloadavg(),
                "runs": [asdict(r) for r in runs],
                "overhead": overhead,
            }
            common.save(result, asked.out)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
