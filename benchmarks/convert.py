"""Time `lpconv convert` against `cp` and against transformers, on synthetic checkpoints.

    python -m benchmarks.convert --work DIRECTORY [--sizes 2GB,8GB] [--dtypes float32,bfloat16] [--rounds 5]

Each case is a process of its own:

- `cp` copies the checkpoint and syncs every file of the copy.
- A method and format is `lpconv convert --verify weights`, with its hashes, checks and reports; it syncs what it writes.
- `transformers` loads the checkpoint, casts it to float16 and saves it. It does not sync, which is in its favour.

Cases take turns, once per round, so that whatever else the machine does hits all of them, and a case is compared with
`cp` of the same round. A rate counts bytes read plus bytes written. The source is read once before the first round, so
it comes from the page cache as long as memory allows; outputs are removed after each run, and before each run the disk
is given time to finish what the last one left.
"""

import argparse
import dataclasses
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["CASES", "Case", "Measurement", "Subject", "measure", "table"]

_RESULTS = Path(__file__).parent / "results"
_SOURCE, _OUTPUT = "SOURCE", "OUTPUT"
_COPY = 'cp -r "$0" "$1" && sync "$1"/*'
_TRANSFORMERS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16)
model.save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to time: a command, in which the words SOURCE and OUTPUT stand for the two directories."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A source checkpoint: `size` and `dtype` as asked for, and where it lies."""

    size: str
    dtype: str
    directory: Path


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run. `cpu_s` is user and system time; `reported_s` is what lpconv itself says, None for other commands."""

    size: str
    dtype: str
    case: str
    round: int
    bytes_in: int
    bytes_out: int
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    reported_s: float | None

    @property
    def rate(self) -> float:
        """Bytes read and written per second of wall time."""
        return (self.bytes_in + self.bytes_out) / self.wall_s


def _lpconv(method: str, fmt: str, residual: str | None = None) -> Case:
    command = [sys.executable, "-m", "lpconv", "convert", _SOURCE, "--output", _OUTPUT, "--method", method]
    command += ["--format", fmt, "--verify", "weights", "--json", "--quiet"]
    if residual is not None:
        command += ["--residual", residual]
    return Case(name=f"{method} {residual or fmt}", command=tuple(command))


CASES = {
    c.name: c
    for c in (
        Case(name="cp", command=("sh", "-c", _COPY, _SOURCE, _OUTPUT)),
        *(_lpconv("unit", f) for f in ("fp32", "fp16", "bf16", "e4m3fn", "e5m2")),
        _lpconv("scalify", "fp16"),
        *(_lpconv("collage", "bf16", r) for r in ("bf16", "exact16", "int8")),
        Case(name="transformers", command=(sys.executable, "-c", _TRANSFORMERS, _SOURCE, _OUTPUT)),
    )
}


def measure(case: Case, subject: Subject, output: Path, index: int) -> Measurement:
    """Run a case once, in round `index`, and remove what it wrote. Raises RuntimeError where it fails."""
    os.sync()
    words = {_SOURCE: str(subject.directory), _OUTPUT: str(output)}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = time.perf_counter()
        process = subprocess.Popen([words.get(w, w) for w in case.command], stdout=stdout, stderr=stderr)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            stderr.seek(0)
            raise RuntimeError(f"{case.name} exited with {process.returncode}:\n{stderr.read().decode()}")
        stdout.seek(0)
        printed = stdout.read()
    bytes_out = _size_bytes(output)
    shutil.rmtree(output)
    return Measurement(
        size=subject.size,
        dtype=subject.dtype,
        case=case.name,
        round=index,
        bytes_in=_size_bytes(subject.directory),
        bytes_out=bytes_out,
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss * 1024,
        reported_s=json.loads(printed)["seconds"] if printed else None,
    )


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: one row per subject and case, medians over rounds."""
    rows = [
        "| source | case | GB in + out | seconds | spread | reported | GB/s | ratio to cp | CPU s | peak RSS, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((m.size, m.dtype, m.case) for m in measurements)
    return "\n".join([*rows, *(_row(measurements, *key) for key in keys)]) + "\n"


def _row(measurements: Sequence[Measurement], size: str, dtype: str, case: str) -> str:
    of_subject = [m for m in measurements if (m.size, m.dtype) == (size, dtype)]
    copies = {m.round: m.rate for m in of_subject if m.case == "cp"}
    runs = [m for m in of_subject if m.case == case]
    seconds = [m.wall_s for m in runs]
    reported = [m.reported_s for m in runs if m.reported_s is not None]
    ratios = [m.rate / copies[m.round] for m in runs if m.round in copies]
    cells = (
        f"{size} {dtype}",
        case,
        f"{(runs[0].bytes_in + runs[0].bytes_out) / 1e9:.2f}",
        f"{statistics.median(seconds):.2f}",
        f"{min(seconds):.2f}–{max(seconds):.2f}",
        f"{statistics.median(reported):.2f}" if reported else "",
        f"{statistics.median(m.rate for m in runs) / 1e9:.2f}",
        f"{statistics.median(ratios):.2f}" if ratios else "",
        f"{statistics.median(m.cpu_s for m in runs):.2f}",
        f"{statistics.median(m.peak_rss_bytes for m in runs) / 1e6:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def _size_bytes(directory: Path) -> int:
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())


def _subject(work: Path, size: str, dtype: str) -> Subject:
    """The checkpoint below `work`, made if it is not there. In a process of its own: peak RSS is inherited on exec."""
    directory = work / f"llama-{size}-{dtype}"
    if not directory.exists():
        print(f"making {directory}", file=sys.stderr)
        maker = [sys.executable, "-m", "benchmarks.synthetic", str(directory), "--size", size, "--dtype", dtype]
        subprocess.run(maker, check=True)
    return Subject(size=size, dtype=dtype, directory=directory)


def _warm(directory: Path) -> None:
    subprocess.run(["sh", "-c", 'cat "$0"/* >/dev/null', str(directory)], check=True)


def _runs(subjects: Sequence[Subject], cases: Sequence[Case], rounds: int, output: Path) -> Iterator[Measurement]:
    for subject in subjects:
        _warm(subject.directory)
        for index in range(rounds):
            for case in cases:
                m = measure(case, subject, output, index)
                print(f"{m.size} {m.dtype} {m.case}: {m.wall_s:.2f} s, {m.rate / 1e9:.2f} GB/s", file=sys.stderr)
                yield m


def _machine(work: Path) -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = dict(part.split(":", 1) for part in map(str.strip, cpuinfo) if ":" in part)
    model = next((v.strip() for k, v in fields.items() if k.strip() == "model name"), platform.machine())
    disk = subprocess.run(["df", "--output=fstype", str(work)], capture_output=True, text=True, check=True)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": disk.stdout.split()[-1],
        "kernel": platform.release(),
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in ("torch", "transformers")}}


def _save(measurements: Sequence[Measurement], context: dict[str, object], results: Path) -> None:
    results.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": 1, **context, "measurements": [dataclasses.asdict(m) for m in measurements]}
    (results / "convert.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = [f"- {name}: {value}" for name, value in context.items()]
    text = "\n".join(["# Conversion speed", "", *lines, "", table(measurements)])
    (results / "convert.md").write_text(text, encoding="utf-8")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, kept, and for outputs")
    parser.add_argument("--sizes", type=_names, default=["2GB", "8GB"])
    parser.add_argument("--dtypes", type=_names, default=["float32", "bfloat16"])
    parser.add_argument("--cases", type=_names, default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    subjects = [_subject(args.work, size, dtype) for size in args.sizes for dtype in args.dtypes]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        cases = [CASES[name] for name in args.cases]
        measurements = list(_runs(subjects, cases, args.rounds, Path(folder) / "output"))
    context = {"command": shlex.join(sys.orig_argv[1:]), **_machine(args.work), **_versions()}
    _save(measurements, context, args.results)
    print(table(measurements), end="")


if __name__ == "__main__":
    _main()
