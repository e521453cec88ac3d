"""Time `lpconv convert` against `cp` and transformers, on synthetic checkpoints.

    python -m benchmarks.speed.convert --work DIRECTORY [--sizes 2GB,8GB] [--dtypes float32,bfloat16] [--rounds 5]

Each case is its own process:

- `cp` copies the checkpoint and syncs every file of the copy.
- A method and format is `lpconv convert --verify weights` with hashes, checks and reports; it syncs its output.
- With `--verify`, each output is also compared by `lpconv verify --level weights`, which reads source and output, and
  `lpconv restore` writes it in the source's dtype.
- `transformers` loads the checkpoint, casts it to float16 and saves it. It does not sync, which is in its favour.

Cases alternate within a round, so that other work on the machine affects all of them, and each is compared with `cp` of
the same round. With `--before`, the folder of another lpconv, both alternate. `of SHA-256` is the time in which one
core hashes as many bytes as the output has, over the time of the case. Rates count bytes read plus bytes written. The
source is read once before the first round, so it comes from the page cache if memory allows; outputs are removed after
each run. Each run waits for the disk and then some seconds, because a virtual machine may return freed memory to its
host, which would favour a run right after another. A checkpoint needs its size on disk, twice while it is copied.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common

_SYNTHETIC = Path(__file__).with_name("synthetic.py")
_COLUMNS = ("source", "case", "GB in + out", "s", "least to most", "reported s", "GB/s", "of cp", "of transformers",
            "of SHA-256", "CPU s", "peak RSS, MB")  # fmt: skip
_SOURCE, _OUTPUT, _RESTORED = "SOURCE", "OUTPUT", "RESTORED"
_COPY = 'cp -r "$0" "$1" && sync "$1"/*'
_TRANSFORMERS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16)
model.save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command to time, with placeholders SOURCE and OUTPUT for the two directories.

    `tree` is the folder whose lpconv runs, None for other commands.
    """

    name: str
    command: tuple[str, ...]
    tree: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A source checkpoint: requested size and dtype, and its folder."""

    size: str
    dtype: str
    directory: Path


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run. `cpu_s` is user and system time, `reported_s` lpconv's own time, `sha256_s` the time to hash the output
    on one core.
    """

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
    sha256_s: float | None = None

    @property
    def rate(self) -> float:
        """Bytes read and written per second of wall time."""
        return (self.bytes_in + self.bytes_out) / self.wall_s


def _lpconv(method: str, *options: str) -> Case:
    words = ("convert", _SOURCE, "--output", _OUTPUT, "--method", method, *options, "--verify", "weights")
    return Case(name=f"{method} {options[-1]}", command=_command(*words), tree=common.ROOT)


def _command(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "lpconv", *words, "--json", "--quiet")


def _with_output(case: Case) -> Iterator[Case]:
    """A conversion, and what reads its output."""
    yield case
    verify = _command("verify", _OUTPUT, "--against", _SOURCE, "--level", "weights")
    yield dataclasses.replace(case, name=f"verify {case.name}", command=verify)
    restore = _command("restore", _OUTPUT, "--output", _RESTORED, "--force")
    yield dataclasses.replace(case, name=f"restore {case.name}", command=restore)


CASES = {
    c.name: c
    for c in (
        Case(name="cp", command=("sh", "-c", _COPY, _SOURCE, _OUTPUT)),
        *(_lpconv("unit", "--format", f) for f in ("fp32", "fp16", "bf16", "e4m3fn", "e5m2")),
        *(_lpconv("unit", "--bits", bits) for bits in ("3", "4.5")),
        _lpconv("scalify", "--format", "fp16"),
        *(_lpconv("collage", "--format", "bf16", "--residual", r) for r in ("bf16", "exact16", "int8")),
        Case(name="transformers", command=(sys.executable, "-c", _TRANSFORMERS, _SOURCE, _OUTPUT)),
    )
}


def measure(case: Case, subject: Subject, output: Path, *, index: int, rest_s: float) -> Measurement:
    """Run a case once, in round `index`. Raises RuntimeError if it fails."""
    os.sync()
    time.sleep(rest_s)
    hashing = _sha256_rate()
    environment = os.environ if case.tree is None else os.environ | {"PYTHONPATH": str(case.tree)}
    words = {_SOURCE: str(subject.directory), _OUTPUT: str(output), _RESTORED: str(output.with_name("restored"))}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = time.perf_counter()
        process = subprocess.Popen(
            [words.get(w, w) for w in case.command], stdout=stdout, stderr=stderr, env=environment, cwd=output.parent
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            stderr.seek(0)
            raise RuntimeError(f"{case.name} exited with {process.returncode}:\n{stderr.read().decode()}")
        stdout.seek(0)
        printed = stdout.read()
    bytes_out = _size_bytes(output)
    report = json.loads(printed) if printed else {}
    return Measurement(
        size=subject.size,
        dtype=subject.dtype,
        case=case.name,
        round=index,
        bytes_in=_size_bytes(subject.directory),
        bytes_out=bytes_out,
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        # The system's figure for a child is never below this process's memory at the start.
        peak_rss_bytes=report.get("peak_rss_bytes", usage.ru_maxrss * 1024),
        reported_s=report.get("seconds"),
        sha256_s=bytes_out / hashing,
    )


def _sha256_rate() -> float:
    """Hashing rate of one core, in bytes per second."""
    data, rates = bytes(2**20), []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(32):
            hashlib.sha256(data)
        rates.append(32 * len(data) / (time.perf_counter() - started))
    return max(rates)


def table(measurements: Sequence[Measurement]) -> str:
    """A Markdown table: one row per subject and case, medians over rounds."""
    keys = dict.fromkeys((m.size, m.dtype, m.case) for m in measurements)
    return common.markdown(_COLUMNS, (_row(measurements, *key) for key in keys))


def _row(measurements: Sequence[Measurement], size: str, dtype: str, case: str) -> tuple[str, ...]:
    of_subject = [m for m in measurements if (m.size, m.dtype) == (size, dtype)]
    runs = [m for m in of_subject if m.case == case]
    seconds = [m.wall_s for m in runs]
    return (
        f"{size} {dtype}",
        case,
        f"{(runs[0].bytes_in + runs[0].bytes_out) / 1e9:.2f}",
        _median(seconds),
        f"{min(seconds):.2f}–{max(seconds):.2f}",
        _median([m.reported_s for m in runs if m.reported_s is not None]),
        _median([m.rate / 1e9 for m in runs]),
        _median(_ratios(runs, [m for m in of_subject if m.case == "cp"])),
        _median(_ratios(runs, [m for m in of_subject if m.case == "transformers"])),
        _median([m.sha256_s / m.wall_s for m in runs if m.sha256_s is not None]),
        _median([m.cpu_s for m in runs]),
        f"{max(m.peak_rss_bytes for m in runs) / 1e6:.0f}",
    )


def _ratios(runs: Sequence[Measurement], others: Sequence[Measurement]) -> list[float]:
    """Rates of `runs` over those of `others` in the same rounds."""
    rates = {m.round: m.rate for m in others}
    return [m.rate / rates[m.round] for m in runs if m.round in rates]


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else ""


def _size_bytes(directory: Path) -> int:
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())


def subject_in(work: Path, size: str, dtype: str) -> Subject:
    """The checkpoint in `work`, created unless it exists, in its own process because peak RSS is inherited on exec."""
    directory = work / f"llama-{size}-{dtype}"
    if not directory.exists():
        print(f"making {directory}", file=sys.stderr)
        maker = [sys.executable, str(_SYNTHETIC), str(directory), "--size", size, "--dtype", dtype]
        subprocess.run(maker, check=True)
    return Subject(size=size, dtype=dtype, directory=directory)


def _warm(directory: Path) -> None:
    subprocess.run(["sh", "-c", 'cat "$0"/* >/dev/null', str(directory)], check=True)


def _runs(
    subjects: Sequence[Subject], cases: Sequence[Case], output: Path, *, rounds: int, rest_s: float, verifies: bool
) -> Iterator[Measurement]:
    for subject in subjects:
        _warm(subject.directory)
        for index in range(rounds):
            for case in cases:
                for each in _with_output(case) if verifies and case.tree else [case]:
                    m = measure(each, subject, output, index=index, rest_s=rest_s)
                    print(f"{m.size} {m.dtype} {m.case}: {m.wall_s:.2f} s, {m.rate / 1e9:.2f} GB/s", file=sys.stderr)
                    yield m
                for folder in (output, output.with_name("restored")):
                    shutil.rmtree(folder, ignore_errors=True)


def _in_turn(names: Sequence[str], before: Path | None) -> Iterator[Case]:
    """The cases; those of lpconv are preceded by the same case of the other tree."""
    for case in (CASES[n] for n in names):
        if before is not None and case.tree is not None:
            yield dataclasses.replace(case, name=f"{case.name}, before", tree=before.resolve())
        yield case


def machine(work: Path) -> dict[str, object]:
    """The usual description, with memory and disk, on which the rates depend."""
    disk = subprocess.run(["df", "--output=source,fstype", str(work)], capture_output=True, text=True, check=True)
    return common.machine() | {
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk": " ".join(disk.stdout.splitlines()[-1].split()),
    }


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, kept, and for outputs")
    parser.add_argument("--sizes", type=_names, default=["2GB", "8GB"])
    parser.add_argument("--dtypes", type=_names, default=["float32", "bfloat16"])
    parser.add_argument("--cases", type=_names, default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--verify", action="store_true", help="time `lpconv verify` and `lpconv restore` too")
    parser.add_argument("--before", type=Path, help="folder of another lpconv", metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=3, help="seconds before each run", metavar="SECONDS")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    context = {"command": common.command(), **machine(args.work)}
    cases = list(_in_turn(args.cases, args.before))
    subjects = [subject_in(args.work, size, dtype) for size in args.sizes for dtype in args.dtypes]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        output, rounds = Path(folder) / "output", args.rounds
        measurements = list(_runs(subjects, cases, output, rounds=rounds, rest_s=args.rest, verifies=args.verify))
    rows = [dataclasses.asdict(m) for m in measurements]
    common.save({"schema_version": 1, **context, "measurements": rows}, args.out)
    print(table(measurements), end="")


if __name__ == "__main__":
    main()
