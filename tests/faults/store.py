"""Kill conversions from and to an object store, let its requests fail, and compare the objects with a local output.

    python -m tests.faults.store                     # two minutes
    python -m tests.faults.store --long --seed 1     # half an hour

The store is `tests.helpers.object_store`. A conversion is killed at random moments and run again with --resume, at the
end twice at once, of which one may lose with exit code 8. After a kill there is either no `lpconv.json` or a complete
output. Then each kind of request fails at random. In the end there are the objects of a local output and no others.
Faults are printed, and the exit code is 1 if there are any.
"""

import argparse
import collections
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lpconv.data import demo_checkpoint
from tests.helpers.object_store import ENVIRONMENT, Fault, Request, Store, serving

Faults = Callable[[Request], Fault | None]
_SHAPE = ("--format", "e4m3fn", "--max-shard-size", "400KB", "--verify", "weights", "-q")
_CONVERT = ("convert", "s3://bucket/source", *_SHAPE, "-o", "s3://bucket/out")
_MOST = 5  # kills, or attempts, of one conversion
_SHARE = 0.25  # of the requests of a kind that fail
_PER_SECOND = 8  # requests that a throttled store answers
_NAMES_SOURCE = ("lpconv.json", "README.md")  # which differ from those of a local conversion


def begin(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    """Start `lpconv ARGUMENTS…` with a cache of its own, as on a machine of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "lpconv", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a process, and the end of what it wrote to stderr."""
    said = process.communicate()[1]
    return process.returncode, said[-300:]


def problems(store: Store, expected: dict[str, str], *, is_ended: bool) -> list[str]:
    """What is wrong with the objects of an output, at its end or after a kill."""
    prefix = "out/"
    sums = {
        k.removeprefix(prefix): hashlib.sha256(x).hexdigest() for k, x in store.objects.items() if k.startswith(prefix)
    }
    if "lpconv.json" not in sums:
        return ["there is no output"] if is_ended else []
    found = [f"{n} has other bytes" for n, d in expected.items() if sums.get(n) != d and n not in _NAMES_SOURCE]
    others = sums.keys() - expected.keys() - {"SHA256SUMS", "report.json", "report.html"}
    return found + [f"{n} is left" for n in others if is_ended or "lpconv-unfinished" not in n]


def clear(store: Store) -> None:
    """Delete the output."""
    for key in [k for k in store.objects if k.startswith("out")]:
        del store.objects[key]


def kill(store: Store, expected: dict[str, str], takes_s: float, draw: random.Random, work: Path) -> Iterator[str]:
    """Faults of one conversion that is killed up to five times, and then resumed by two processes at once."""
    clear(store)
    resume: tuple[str, ...] = ()
    for _ in range(draw.randint(1, _MOST)):
        process = begin(*_CONVERT, *resume, cache=work / "cache")
        time.sleep(draw.uniform(0, takes_s))
        process.kill()
        code, said = end(process)
        if code not in (0, -9):
            yield f"exit code {code}: {said}"
        yield from problems(store, expected, is_ended=False)
        resume = ("--resume",)
        if draw.random() < 0.5:
            shutil.rmtree(work / "cache", ignore_errors=True)  # as on another machine
    both = [end(p) for p in [begin(*_CONVERT, "--resume", cache=work / name) for name in ("cache", "other")]]
    if sorted(code for code, _ in both) not in ([0, 0], [0, 8]):
        yield f"two at once: {both}"
    yield from problems(store, expected, is_ended=True)


def some(is_of_kind: Callable[[Request], bool], fault: Fault, draw: random.Random) -> Faults:
    """The fault for a share of the requests of a kind."""
    return lambda r: fault if is_of_kind(r) and draw.random() < _SHARE else None


def throttle() -> Faults:
    """Status 503 for requests that follow others too soon."""
    answered, lock = collections.deque[float](maxlen=_PER_SECOND), threading.Lock()

    def fault(r: Request) -> Fault | None:
        with lock:
            now = time.monotonic()
            if len(answered) == _PER_SECOND and now - answered[0] < 1:
                return Fault(status=503)
            answered.append(now)
            return None

    return fault


def is_read(r: Request) -> bool:
    return r.method == "GET" and r.first is not None


def is_write(r: Request) -> bool:
    return r.method in ("PUT", "POST") and r.query != "delete"


def kinds_of_faults(draw: random.Random) -> dict[str, Faults]:
    """What can go wrong with requests, by name."""
    return {
        "reads cut short": some(is_read, Fault(cut=1000), draw),
        "slow reads": some(is_read, Fault(pause_s=0.3), draw),
        "500": some(lambda _: True, Fault(status=500), draw),
        "503": some(lambda _: True, Fault(status=503), draw),
        "throttled": throttle(),
        "writes done but answered by 500": some(is_write, Fault(status_after=500), draw),
    }


def fail(store: Store, expected: dict[str, str], fault: Faults, work: Path) -> Iterator[str]:
    """Faults of one conversion, resumed until it is done, while requests fail."""
    clear(store)
    store.fault, codes = fault, list[int]()
    while codes[-1:] != [0] and len(codes) < _MOST:
        codes.append(end(begin(*_CONVERT, *(["--resume"] if codes else []), cache=work / "cache"))[0])
    store.fault = lambda _: None
    yield from (f"{p}, after exit codes {codes}" for p in problems(store, expected, is_ended=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="20 conversions that are killed instead of two")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, faults = random.Random(asked.seed), list[str]()
    with tempfile.TemporaryDirectory() as folder, serving() as store:
        work = Path(folder)
        os.environ |= {**ENVIRONMENT, "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        os.environ["AWS_ENDPOINT_URL"] = store.endpoint
        store.put_folder("source", demo_checkpoint())
        started = time.perf_counter()
        code, said = end(begin("convert", "demo", *_SHAPE, "-o", str(work / "local"), cache=work / "cache"))
        takes_s = time.perf_counter() - started
        assert code == 0, said
        lines = (work / "local" / "SHA256SUMS").read_text().splitlines()
        expected = {line[66:]: line[:64] for line in lines}
        for number in range(20 if asked.long else 2):
            found = [*kill(store, expected, takes_s, draw, work)]
            print(f"killed conversion {number}: {found or 'no fault'}", flush=True)
            faults += found
        for kind, fault in kinds_of_faults(draw).items():
            found = [*fail(store, expected, fault, work)]
            print(f"{kind}: {found or 'no fault'}", flush=True)
            faults += found
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
