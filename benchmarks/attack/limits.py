"""Run every command in containers too small for it: each has to end in its work, or in exit code 7 before it.

    python -m benchmarks.attack.limits --work DIRECTORY --out FILE.json
    python -m benchmarks.attack.limits --work DIRECTORY --seven --out FILE.json
    python -m benchmarks.attack.limits --work DIRECTORY --dry --out FILE.json

A container is a cgroup below that of this process (version 1 or 2, which needs root); where none can be made, it is a
limit of the address space, which counts every mapped library and so is harsher. `--seven` converts and verifies a
checkpoint of the size of a 7B model in 1 GB; `--dry` compares the memory and seconds that `convert --dry-run` names
with those that the conversion takes, without a limit. What is said of a run: `done`; `refused`, exit 7 before the work;
`too late`, exit 7 when memory had run out; `killed`; `thrashes`, still at it after minutes; or another exit code.
"""

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from lpconv.data import demo_checkpoint

GB = 10**9
_LIMITS = (int(0.3 * GB), int(0.7 * GB), int(2.6 * GB))
_PATIENCE_S = 400
_TUNE = ("--steps", "2", "--seq-len", "32", "--batch-size", "2", "--eval-batches", "1", "--twin", "none")
_BENCH = ("--format", "bf16", "--compile", "off", "--min-iters", "1", "--min-time", "0", "--rounds", "1",
          "--launches", "1", "--seq", "32")  # fmt: skip
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One command under one limit. `peak_rss_bytes` is that of its largest process."""

    model: str
    command: str
    limit_bytes: int | None
    outcome: str
    code: int
    seconds: float
    peak_rss_bytes: int
    said: str


@contextmanager
def contained(limit_bytes: int | None) -> Iterator[Callable[[], None]]:
    """Gives what a child process has to call first, to be limited."""
    if limit_bytes is None:
        yield lambda: None
        return
    folder = _make_cgroup(limit_bytes)
    if folder is None:
        yield lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        return
    try:
        yield lambda: _write(folder / "cgroup.procs", os.getpid())
    finally:
        for _ in range(50):  # a killed process leaves a moment later
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _make_cgroup(limit_bytes: int) -> Path | None:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    parent, file = _CGROUPS / "memory" / (own or "").lstrip("/"), "memory.limit_in_bytes"
    if own is None:
        parent, file = _CGROUPS / next((p for _, names, p in lines if not names), "").lstrip("/"), "memory.max"
    folder = parent / f"lpconv-limits-{os.getpid()}"
    try:
        folder.mkdir()
        _write(folder / file, limit_bytes)
    except OSError:
        return None
    return folder


def _write(path: Path, value: int) -> None:
    path.write_text(f"{value}\n")


def run_in(
    limit_bytes: int | None, arguments: Sequence[str], *, cwd: Path, model: str = "", patience_s: float = _PATIENCE_S
) -> Run:
    """`lpconv ARGUMENTS…` in a container."""
    command = [sys.executable, "-m", "lpconv", *arguments, "--json", "-q"]
    with contained(limit_bytes) as enter:
        started = time.monotonic()
        with (cwd / "stdout").open("wb") as out, (cwd / "stderr").open("wb") as err:
            process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=err, preexec_fn=enter)
            code, peak = _wait(process, started, patience_s)
        seconds = time.monotonic() - started
    said = (cwd / "stderr").read_text(errors="replace").strip().splitlines()
    return Run(
        model=model,
        command=" ".join(arguments),
        limit_bytes=limit_bytes,
        outcome=_outcome(code, (cwd / "stdout").read_text(errors="replace")),
        code=code,
        seconds=round(seconds, 1),
        peak_rss_bytes=peak,
        said=next((line for line in said if line.startswith("error: ")), said[-1] if said else ""),
    )


def _wait(process: "subprocess.Popen[bytes]", started: float, patience_s: float) -> tuple[int, int]:
    """The exit code, and the most memory that one of its processes had."""
    while time.monotonic() - started < patience_s:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used.ru_maxrss * 1024
        time.sleep(0.05)
    process.kill()
    process.wait()
    return -99, 0


def _outcome(code: int, out: str) -> str:
    if code == 0:
        return "done"
    if code == -99:
        return "thrashes"
    if code < 0 or code == 137:
        return "killed"
    if code != 7:
        return f"exit {code}"
    message = json.loads(out)["error"]["message"]
    return "too late" if message.startswith(("out of memory", "the system ended")) else "refused"


def _commands(model: str) -> Iterator[tuple[str, ...]]:
    """What is tried; those after the first read its output, which is made again without a limit where it is missing."""
    yield "convert", model, "--format", "e4m3fn", "-o", "converted", "--force"
    yield "convert", model, "--format", "e4m3fn", "--verify", "logits", "-o", "again", "--force"
    yield "verify", "converted", "--against", model, "--level", "weights"
    yield "verify", "converted", "--against", model, "--level", "logits"
    yield "restore", "converted", "-o", "restored", "--force"
    yield "probe", model, "--steps", "1", "--seq-len", "32", "--batch-size", "2", "-o", "probe", "--force"
    yield "finetune", model, "--recipe", "collage-bf16", *_TUNE, "-o", "tuned", "--force"
    yield "export", "onnx", "converted", "-o", "onnx", "--force"
    yield "bench", model, *_BENCH


def _all(work: Path, only: str | None) -> Iterator[Run]:
    for name, model in _models(work).items():
        folder = work / f"runs-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        run_in(None, ("convert", model, "--format", "e4m3fn", "--verify", "none", "-o", "converted"), cwd=folder)
        for limit in _LIMITS:
            for arguments in _commands(model):
                if only is None or arguments[0] == only:
                    yield run_in(limit, arguments, cwd=folder, model=name)
        shutil.rmtree(folder)


def _models(work: Path) -> dict[str, str]:
    """The demo model; 600 M parameters in bf16 with the tokenizer of the demo."""
    large = work / "600M"
    if not large.exists():
        _make(large, "1.2GB")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(demo_checkpoint() / name, large / name)
    return {"demo": "demo", "600M": str(large)}


def _make(directory: Path, size: str) -> None:
    """A synthetic checkpoint, by a process of its own: what this one holds counts in its children's peaks."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed.synthetic",
        str(directory),
        "--size",
        size,
        "--dtype",
        "bfloat16",
    ]
    subprocess.run(command, check=True)


def _seven(work: Path) -> Iterator[Run]:
    """A checkpoint of 13.5 GB in bf16 in 1 GB of memory."""
    source = work / "7B"
    if not source.exists():
        _make(source, "13.5GB")
    model = str(source)
    for arguments in (
        ("convert", model, "--format", "e4m3fn", "--verify", "weights", "-o", "converted"),
        ("verify", "converted", "--against", model, "--level", "weights"),
        ("verify", "converted", "--against", model, "--level", "logits"),
        ("convert", model, "--verify", "logits", "-o", "again"),
        ("restore", "converted", "-o", "restored"),
    ):
        yield run_in(GB, arguments, cwd=work, model="7B", patience_s=3600)
    for name in ("converted", "restored"):
        shutil.rmtree(work / name, ignore_errors=True)


def _dry(work: Path) -> Iterator[dict[str, Any]]:
    """The figures of dry runs beside those of the runs."""
    for name, model in _models(work).items():
        for how in (("--format", "e4m3fn"), ("--method", "collage"), ("--method", "multipoint")):
            for level in ("weights", "logits"):
                if (name, level) == ("600M", "logits"):
                    continue  # it would take memory from everybody
                folder = work / "dry"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                arguments = ("convert", model, *how, "--verify", level, "-o", "out")
                run_in(None, (*arguments, "--dry-run"), cwd=folder)
                said = json.loads((folder / "stdout").read_text())
                run_in(None, arguments, cwd=folder, model=name)
                done = json.loads((folder / "stdout").read_text())
                yield {
                    "model": name,
                    "how": " ".join(how),
                    "verify": level,
                    "memory_bytes": said["memory_bytes"],
                    "peak_rss_bytes": done["peak_rss_bytes"],
                    "memory_ratio": round(said["memory_bytes"] / done["peak_rss_bytes"], 2),
                    "estimated_s": round(said["seconds"], 2),
                    "seconds": round(done["seconds"], 2),
                    "seconds_ratio": round(said["seconds"] / done["seconds"], 2),
                }


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each command and model, a column for each limit."""
    limits = sorted({r.limit_bytes for r in runs if r.limit_bytes})
    rows = dict.fromkeys((r.model, _short(r)) for r in runs)
    found = {(r.model, _short(r), r.limit_bytes): r for r in runs}
    lines = [
        "| model | command | " + " | ".join(f"{n / GB:g} GB" for n in limits) + " |",
        "|---|---|" + "---|" * len(limits),
    ]
    for model, command in rows:
        cells = [_cell(found.get((model, command, limit))) for limit in limits]
        lines.append(f"| {model} | {command} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _short(run: Run) -> str:
    words = run.command.split()
    levels = [w for w in words if w in ("weights", "logits")]
    return " ".join([words[0], *levels[:1]])


def _cell(run: Run | None) -> str:
    return "" if run is None else f"{run.outcome}, {run.seconds:g} s, {run.peak_rss_bytes / 1e6:.0f} MB"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", help="one command")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seven", action="store_true")
    what.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    found: list[Any] = []
    for run in _dry(args.work) if args.dry else _seven(args.work) if args.seven else _all(args.work, args.only):
        found.append(run)
        print(json.dumps(run if args.dry else dataclasses.asdict(run)), flush=True)
    if not args.dry:
        print(table(found))
    common.save(found if args.dry else [dataclasses.asdict(r) for r in found], args.out)


if __name__ == "__main__":
    main()
