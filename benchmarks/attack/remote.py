"""Conversions from and to an object store on the loopback: rate and memory beside a disk's, and kills at any moment.

    python -m benchmarks.attack.remote rate --work DIRECTORY --size 8GB --out FILE.json
    python -m benchmarks.attack.remote kills --count 40 --out FILE.json

The store is `object_store.py`, in a process of its own, or another S3 server: `--endpoint URL`, with a
bucket called `bucket` in it, and `--server NAME` for the record. A conversion reads from the store and writes to it, is
ended by SIGKILL at a moment drawn from the time that it takes, and goes on with --resume; up to five times, and then
two at once are let run, of which one may lose by exit code 8. After a kill, either there is no `lpconv.json`, or the
output is whole; in the end there are the bytes of a local run, and nothing else.
"""

import functools
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.attack.forked import begin, command_line, forked, killed
from benchmarks.attack.object_store import ENVIRONMENT
from benchmarks.speed.synthetic import make_checkpoint
from lpconv.data import demo_checkpoint
from lpconv.options import parse_size

SHAPE = ("--format", "e4m3fn", "--max-shard-size", "400KB", "--verify", "weights", "-q")
_MOST = 5  # kills of one conversion
_UNFINISHED = "lpconv-unfinished"


@contextmanager
def store_of(folder: Path, endpoint: str | None) -> Iterator[None]:
    """A store that holds a folder as `s3://bucket/source`, which the environment names up to the end of the block."""
    os.environ |= {**ENVIRONMENT, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    if endpoint is not None:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        for path in folder.iterdir():
            ask_store("put", f"source/{path.name}", str(path))
        yield
        return
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.attack.object_store", str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        os.environ["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        yield
    finally:
        server.terminate()
        server.wait()


def ask_store(action: str, *arguments: str) -> str:
    """Do something with the store in a process of its own: one that forks must not have obstore's threads."""
    done = forked(functools.partial(s3, action, *arguments))
    assert done.code == 0, done.err
    return done.out


def s3(action: str, *arguments: str) -> None:
    """What `ask_store` asks for: to put a file, to delete an output, or to tell the SHA-256 sums and names of one."""
    import obstore.store

    store = obstore.store.from_url("s3://bucket", client_options={"allow_http": True})
    if action == "put":
        store.put(arguments[0], Path(arguments[1]))
        return
    names = [meta["path"] for batch in store.list(arguments[0]) for meta in batch]
    if action == "delete" and names:
        store.delete(names)
    if action == "sums":
        sums = {n.partition("/")[2]: hashlib.sha256(bytes(store.get(n).bytes())).hexdigest() for n in names}
        print(json.dumps(sums))


def measure_rates(work: Path, size: int, endpoint: str | None) -> list[dict[str, Any]]:
    """Every pair of a disk and a store as source and output, each in a fresh process."""
    source = work / "source"
    if not source.exists():
        make_checkpoint(source, size, torch.float32)
    runs = []
    with store_of(source, endpoint):
        for model in (str(source), "s3://bucket/source"):
            for output in (str(work / "out"), "s3://bucket/out"):
                os.environ["XDG_CACHE_HOME"] = str(work / "cache")
                shutil.rmtree(work / "out", ignore_errors=True)
                arguments = ("convert", model, "-o", output, "-f", "e4m3fn", "--verify", "weights", "--force", "--json")
                command = [sys.executable, "-m", "lpconv", *arguments]
                foretold, _ = _timed([*command, "--dry-run"])
                done, processor_s = _timed(command)
                runs.append(
                    {
                        "source": "disk" if model == str(source) else "store",
                        "output": "store" if output.startswith("s3:") else "disk",
                        "source_bytes": done["bytes"]["read"],
                        "output_bytes": done["bytes"]["written"],
                        "weights_s": round(done["weights_seconds"], 1),
                        "whole_s": round(done["seconds"], 1),
                        "processor_s": round(processor_s, 1),
                        "peak_rss_mb": done["peak_rss_bytes"] // 10**6,
                        "foretold_mb": foretold["memory_bytes"] // 10**6,
                    }
                )
                print(json.dumps(runs[-1]), flush=True)
    return runs


def _timed(command: Sequence[str]) -> tuple[dict[str, Any], float]:
    """What a command prints, and the processor time that it took, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sums_of(output: Path) -> dict[str, str]:
    return {line[66:]: line[:64] for line in (output / "SHA256SUMS").read_text().splitlines()}


def faults_of(wanted: dict[str, str], *, is_ended: bool) -> list[str]:
    """What is wrong with what lies in the store, at the end of a run or after a kill."""
    found: dict[str, str] = json.loads(ask_store("sums", "out"))
    if "lpconv.json" not in found:
        return ["there is no output"] if is_ended else []
    faults = [f"{name} has other bytes" for name, digest in wanted.items() if found.get(name) != digest]
    left = [name for name in found if name not in {*wanted, "SHA256SUMS", "report.json", "report.html"}]
    return faults + [f"{name} is left" for name in left if is_ended or _UNFINISHED not in name]


def kill_one(
    arguments: Sequence[str], work: Path, takes_s: float, wanted: dict[str, str], draw: random.Random
) -> dict[str, Any]:
    """One conversion, killed and resumed until it is there; two resume at once in the end."""
    ask_store("delete", "out")
    moments, faults = [], []
    resume: tuple[str, ...] = ()
    for _ in range(draw.randint(1, _MOST)):
        moments.append(draw.uniform(0, takes_s))
        ended = killed(functools.partial(command_line, [*arguments, *resume], work), after_s=moments[-1])
        resume = ("--resume",)
        if ended.code not in (0, -9):
            faults.append(f"exit code {ended.code}: {ended.err[-200:]}")
        faults += faults_of(wanted, is_ended=False)
        if draw.random() < 0.5:
            shutil.rmtree(work / "cache", ignore_errors=True)  # as on another machine
    os.environ["XDG_CACHE_HOME"] = str(work / "cache-of-another")
    other = begin(functools.partial(command_line, [*arguments, "--resume"], work))
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    last = forked(functools.partial(command_line, [*arguments, "--resume"], work))
    codes = sorted([last.code, other.end().code])
    if codes not in ([0, 0], [0, 8]):
        faults.append(f"two at once ended with {codes}: {last.err[-300:]}")
    return {
        "kills_s": [round(m, 2) for m in moments],
        "codes_of_two": codes,
        "faults": faults + faults_of(wanted, is_ended=True),
    }


def measure_kills(count: int, endpoint: str | None, seed: int) -> dict[str, Any]:
    """At least so many kills, all of one conversion of the demo model into a dozen files."""
    draw, runs = random.Random(seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, store_of(Path(demo_checkpoint()), endpoint):
        work = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        from lpconv.convert import run  # noqa: F401  # once, for all that are forked
        from lpconv.verify import verify_output  # noqa: F401

        local = forked(functools.partial(command_line, ("convert", "demo", *SHAPE, "-o", "local"), work))
        assert local.code == 0, local.err
        wanted = sums_of(work / "local")
        arguments = ("convert", "s3://bucket/source", *SHAPE, "-o", "s3://bucket/out")
        ask_store("delete", "out")
        started = time.perf_counter()
        whole = forked(functools.partial(command_line, arguments, work))
        assert whole.code == 0, whole.err
        takes_s = time.perf_counter() - started
        wanted["lpconv.json"] = json.loads(ask_store("sums", "out"))["lpconv.json"]  # which names another source
        wanted["README.md"] = json.loads(ask_store("sums", "out"))["README.md"]
        assert not faults_of(wanted, is_ended=True)
        while sum(len(r["kills_s"]) for r in runs) < count:
            runs.append(kill_one(arguments, work, takes_s, wanted, draw))
            print(json.dumps(runs[-1]), flush=True)
    return {
        "takes_s": round(takes_s, 2),
        "files": len(wanted),
        "kills": sum(len(r["kills_s"]) for r in runs),
        "runs": runs,
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("what", choices=("rate", "kills"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--size", type=parse_size, default=2 * 10**9)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endpoint")
    parser.add_argument("--server", default="benchmarks/attack/object_store.py")
    options = parser.parse_args()
    if options.what == "rate":
        found: dict[str, Any] = {"runs": measure_rates(options.work, options.size, options.endpoint)}
    else:
        found = measure_kills(options.count, options.endpoint, options.seed)
    found = {"command": common.command(), "server": options.server, **found}
    print(json.dumps(found, indent=1))
    common.save(found, options.out)


if __name__ == "__main__":
    main()
