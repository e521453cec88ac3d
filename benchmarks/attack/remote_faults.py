"""Conversions from and to an S3 server through a proxy that cuts, slows down, refuses and loses answers.

    python -m benchmarks.attack.remote_faults --endpoint URL --server NAME --out FILE.json

The server has a bucket called `bucket`, and does not look at signatures, which are of the proxy's address: moto, for
example. Each kind of fault gets a conversion of a Llama of 60 MB, by a command that is repeated with --resume where it
ends with an error; in the end there are the bytes of a local conversion, and nothing else.
"""

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.attack.object_store import ENVIRONMENT, Fault, Request, serving
from benchmarks.attack.remote import ask_store, faults_of, sums_of
from benchmarks.speed.synthetic import make_checkpoint

Faults = Callable[[Request], Fault | None]
_BYTES = 60 * 10**6
_SHAPE = ("--format", "e4m3fn", "--max-shard-size", "4MB", "--verify", "weights", "-q")
_SHARE = 0.25  # of the requests of a kind that meet a fault
_MOST_A_SECOND = 8  # requests that a throttled store heeds
_MOST_RUNS = 6


def _some(is_of_kind: Callable[[Request], bool], fault: Fault, draw: random.Random) -> Faults:
    """The fault for a share of the requests of a kind."""
    return lambda r: fault if is_of_kind(r) and draw.random() < _SHARE else None


def _throttle() -> Faults:
    """503 for what comes too soon after the requests before it."""
    heeded, lock = collections.deque[float](maxlen=_MOST_A_SECOND), threading.Lock()

    def fault(r: Request) -> Fault | None:
        with lock:
            now = time.monotonic()
            if len(heeded) == _MOST_A_SECOND and now - heeded[0] < 1:
                return Fault(status=503)
            heeded.append(now)
            return None

    return fault


def _reads(r: Request) -> bool:
    return r.method == "GET" and r.first is not None


def _writes(r: Request) -> bool:
    return r.method in ("PUT", "POST") and r.query != "delete"


def _kinds(draw: random.Random) -> dict[str, Faults]:
    return {
        "none": lambda _: None,
        "reads cut short": _some(_reads, Fault(cut=1000), draw),
        "slow reads": _some(_reads, Fault(pause_s=0.3), draw),
        "500": _some(lambda _: True, Fault(status=500), draw),
        "503": _some(lambda _: True, Fault(status=503), draw),
        f"throttled to {_MOST_A_SECOND} a second": _throttle(),
        "writes done, answered by 500": _some(_writes, Fault(status_after=500), draw),
    }


def measure(endpoint: str, seed: int) -> list[dict[str, Any]]:
    """A conversion under each kind of fault."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, serving() as proxy:
        work = Path(folder)
        os.environ |= {**ENVIRONMENT, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        os.environ |= {"XDG_CACHE_HOME": str(work / "cache"), "AWS_ENDPOINT_URL": proxy.endpoint}
        proxy.upstream = endpoint
        ask_store("delete", "source/")
        make_checkpoint(work / "source", _BYTES, torch.float32)
        for path in (work / "source").iterdir():
            ask_store("put", f"source/{path.name}", str(path))
        _run("convert", str(work / "source"), *_SHAPE, "-o", str(work / "local"))
        wanted = sums_of(work / "local")
        for name, fault in _kinds(random.Random(seed)).items():
            ask_store("delete", "out")
            proxy.requests.clear()
            met, proxy.fault = _counted(fault)
            started = time.perf_counter()
            codes = _until_done("convert", "s3://bucket/source", *_SHAPE, "-o", "s3://bucket/out")
            proxy.fault = lambda _: None
            row = {
                "kind": name,
                "requests": len(proxy.requests),
                "faults": met,
                "exit_codes": codes,
                "seconds": round(time.perf_counter() - started, 1),
            }
            if name == "none":  # they name another source than the local conversion
                stored = json.loads(ask_store("sums", "out"))
                wanted |= {name: stored[name] for name in ("lpconv.json", "README.md")}
            rows.append(row | {"wrong": faults_of(wanted, is_ended=True)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _counted(fault: Faults) -> tuple[dict[str, int], Faults]:
    """What a fault is met by, by method, as it will have been counted; and the fault."""
    met: dict[str, int] = {}

    def counted(r: Request) -> Fault | None:
        found = fault(r)
        met[r.method] = met.get(r.method, 0) + (found is not None)
        return found

    return met, counted


def _until_done(*arguments: str) -> list[int]:
    """The exit codes of a command and its resumptions."""
    codes: list[int] = []
    while codes[-1:] != [0] and len(codes) < _MOST_RUNS:
        codes.append(_run(*arguments, *(["--resume"] if codes else [])))
    return codes


def _run(*arguments: str) -> int:
    done = subprocess.run([sys.executable, "-m", "lpconv", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-500:], file=sys.stderr)
    return done.returncode


def main() -> None:
    """Run, and write the record."""
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rows = measure(asked.endpoint, asked.seed)
    command = f"python -m benchmarks.attack.remote_faults --seed {asked.seed} --endpoint URL --server '{asked.server}'"
    record = {"command": command, "server": asked.server, "rows": rows}
    common.save(record, asked.out)


if __name__ == "__main__":
    main()
