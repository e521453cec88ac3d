"""What all benchmarks share: options, a folder to work in, timing in turn, the machine, and results on disk.

A result is one JSON document in the `results` folder of its group, compressed with xz if its name ends in `.json.xz`.
"""

import argparse
import importlib.metadata
import json
import lzma
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LEFT_OPEN = {"--work": "DIRECTORY", "--before": "TREE", "--out": "FILE", "--te": "FILE", "--smollm2": "DIRECTORY"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "LPCONV_COMPILE": "never"}


def parser(doc: str | None, *, work: str | None = None, needs_out: bool = False) -> argparse.ArgumentParser:
    """An argument parser with a module's docstring, `--out FILE`, and `--work FOLDER` if its help is given."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=needs_out, help="where to write the result")
    if work is not None:
        made.add_argument("--work", type=Path, help=work)
    return made


@contextmanager
def work_folder(given: Path | None, **environment: str) -> Iterator[Path]:
    """Create and keep the given folder, or a temporary one; commands inside are offline and do not compile."""
    os.environ |= OFFLINE | environment
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        yield Path(folder)


def environment(folder: Path, *steps: Sequence[str]) -> Path:
    """The Python of a virtual environment in which pip installed each of the steps, created unless it exists."""
    python, done = folder / "bin" / "python", folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        for words in steps:
            subprocess.run([python, "-m", "pip", "install", "-q", *words], check=True)
        done.touch()
    return python


def command() -> str:
    """The command line of this run, with placeholders for folders of this machine."""
    spec, words = sys.modules["__main__"].__spec__, sys.argv[1:]
    words = [_LEFT_OPEN.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    return shlex.join(["python", *(["-m", spec.name] if spec else sys.argv[:1]), *words])


def machine(*packages: str) -> dict[str, Any]:
    """Processor, load, and the versions of Python, torch, transformers and other installed packages."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **versions("torch", "transformers", *packages)},
    }


def versions(*packages: str) -> dict[str, str]:
    """The versions of those of the packages that are installed."""
    installed = {}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run; the runs alternate for `rounds` rounds, after one warm-up each."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(timed(run))
    return seconds


def timed(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; for fewer than three values the minimum, median and maximum."""
    if len(values) < 3:
        return min(values), statistics.median(values), max(values)
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|\n")
    return "".join(lines)


def save(document: Any, out: Path | None) -> None:
    """Write a result to `out`, if given, replacing the file atomically."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    is_packed = out.suffix == ".xz"
    text = json.dumps(document, indent=None if is_packed else 1) + "\n"
    partial = out.with_name(f"{out.name}.partial")
    partial.write_bytes(lzma.compress(text.encode(), preset=9) if is_packed else text.encode())
    partial.replace(out)


def load(path: Path) -> Any:
    """Read a document written by `save`."""
    raw = path.read_bytes()
    return json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)


def load_or_begin(path: Path) -> dict[str, Any]:
    """The results of earlier runs in a file that `save` wrote, by name; empty if there is no file yet."""
    return load(path) if path.exists() else {}


class Rows:
    """Rows of a result file, saved after each, so that an interrupted command can be resumed.

    A row is identified by its values of `keys`. `head` returns the other entries of the document.
    """

    def __init__(self, out: Path | None, keys: Sequence[str], head: Callable[[], Mapping[str, Any]]) -> None:
        self.out, self.keys, self.head = out, keys, head
        self.rows: list[dict[str, Any]] = load(out)["rows"] if out and out.exists() else []

    def has(self, *values: object) -> bool:
        return any(self._key(row) == values for row in self.rows)

    def put(self, row: dict[str, Any]) -> None:
        """Add a row in place of an older one with the same key, print it and save the document."""
        self.rows = [*(r for r in self.rows if self._key(r) != self._key(row)), row]
        print(json.dumps(row), flush=True)
        save({**self.head(), "rows": self.rows}, self.out)

    def _key(self, row: Mapping[str, Any]) -> tuple[object, ...]:
        return tuple(row.get(k) for k in self.keys)


def recorded(name: str) -> Any:
    """The recorded result of that name in any group, such as "kernels" or "native/sizes/results"."""
    (path,) = [*ROOT.glob(f"benchmarks/*/results/{name}.json"), *ROOT.glob(f"benchmarks/*/results/{name}.json.xz")]
    return load(path)
