"""Kill commands of lpconv at any moment, run them again, and compare the files with those of an undisturbed run.

    python -m tests.faults.kill                      # a few minutes
    python -m tests.faults.kill --long --seed 1      # hours: at random moments, and at the last changes of files

A killed command is run again with --resume, or with --force if it has no --resume. After a kill, nothing incomplete may
look finished, and in the end every file must have the same bytes, except records of time and memory. Faults are
printed, and the exit code is 1 if there are any.
"""

import argparse
import functools
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.forked import command_line, forked, import_everything, killed
from tests.faults.material import PROBE, TUNE, make_material

__all__ = ["COMMANDS", "kill_at_changes", "kill_at_random"]

_MOST = 5  # kills of one command before it is left alone
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")  # events of Python's audit hooks
_TIMED = {"report.json", "report.html", "journal.jsonl"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """Arguments, the option that runs a killed command again, where it writes, and the folders that it reads."""

    arguments: tuple[str, ...]
    again: str = "--force"
    output: str = "out"
    reads: tuple[str, ...] = ()
    marker: str | None = "lpconv.json"  # written last; None if a folder grows in its place
    is_timed: bool = False  # its records are full of times: only names are compared


def _convert(model: str, *options: str) -> Command:
    arguments = ("convert", model, *options, "--verify", "weights", "-q", "-o", "out")
    return Command(arguments=arguments, again="--resume", reads=(model,))


_NVFP4 = ("--format", "e2m1", "--granularity", "nvfp4", "--layout", "compressed-tensors")
_GPTQ = ("--format", "int4", "--granularity", "group:16", "--rounding", "gptq", "--calibration-tokens", "1024")
_STEPS = ("--save-every", "1", "--eval-every", "1", *TUNE, "--steps", "4")
COMMANDS: Mapping[str, Command] = {
    "convert": _convert("sharded", "--format", "e4m3fn"),
    "nvfp4": _convert("sharded", *_NVFP4),
    "calibrate": _convert("llama", *_NVFP4, "--calibrate", "demo"),
    "gptq": _convert("llama", *_GPTQ, "--calibrate", "demo"),
    "init": Command(arguments=("init", "llama", "--reinit", "-q", "-o", "out"), reads=("llama",)),
    "restore": Command(arguments=("restore", "collage", "-q", "-o", "out"), reads=("collage",)),
    "decode": Command(arguments=("restore", "nvfp4", "-q", "-o", "out"), reads=("nvfp4",)),
    "export": Command(arguments=("export", "onnx", "unit", "-q", "-o", "out"), reads=("unit",)),
    "finetune": Command(
        arguments=("finetune", "llama", "--recipe", "collage-bf16", *_STEPS, "-o", "out"), again="--resume",
        reads=("llama",), marker=None,
    ),
    "batch": Command(
        arguments=("batch", "batch/jobs.yaml", "-q"), again="--resume", output="batch", reads=("batch",), marker=None
    ),
    "probe": Command(
        arguments=("probe", "llama", *PROBE, "--calibrate", "-o", "out"), reads=("llama",), marker="probe.json",
        is_timed=True,
    ),
    "advise": Command(
        arguments=("advise", "llama", "--for", "infer", "--seq-len", "16", "-q", "-o", "out"), reads=("llama",),
        marker="advice.json", is_timed=True,
    ),
}  # fmt: skip


def comparable(command: Command, folder: Path) -> Any:
    """The files of an output without times, memory, and what was set aside; only their names if it is timed."""
    output = folder / command.output
    timed = _TIMED | ({"README.md", "run.json", "SHA256SUMS"} if (output / "finetune.json").exists() else set())
    files: dict[str, Any] = {}
    for path in sorted(p for p in output.rglob("*") if p.is_file()):
        name = path.relative_to(output)
        if path.name not in timed and not any(part.endswith(".failed") for part in name.parts):
            files[name.as_posix()] = _rows(path) if path.name == "metrics.jsonl" else path.read_bytes()
    return sorted(files) if command.is_timed else files


def _rows(path: Path) -> list[dict[str, Any]]:
    """Metrics without times and memory."""
    rows = map(json.loads, path.read_text().splitlines())
    return [{k: v for k, v in row.items() if k in ("step", "loss", "eval_loss", "lr", "grad_norm")} for row in rows]


def prepare(command: Command, material: Path, folder: Path) -> None:
    """Empty a folder, except for what the command reads."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in command.reads:
        shutil.copytree(material / name, folder / name, ignore=shutil.ignore_patterns("out", "*.lock*"))


def half_published(command: Command, folder: Path, expected: Any) -> str | None:
    """The fault of an output that looks finished after a kill, but is incomplete."""
    output = folder / command.output
    if command.marker is None or not (output / command.marker).exists():
        return None
    return None if comparable(command, folder) == expected else "half an output after a kill"


def kill_at_random(name: str, count: int, rng: random.Random, material: Path, work: Path) -> Iterator[str]:
    """Faults found by `count` kills or more of a command at random moments, up to five in one run."""
    command, folder = COMMANDS[name], work / "trial"
    prepare(command, material, folder)
    started = time.monotonic()
    ended = forked(lambda: command_line(command.arguments, folder))
    takes_s, expected = time.monotonic() - started, comparable(command, folder)
    assert ended.code == 0, ended.err
    kills = 0
    while kills < count:
        prepare(command, material, folder)
        again: tuple[str, ...] = ()
        for attempt in range(_MOST + 1):
            action = functools.partial(command_line, (*command.arguments, *again), folder)
            moment = rng.uniform(0, 1.05 * takes_s)
            ended = killed(action, after_s=moment) if attempt < _MOST else forked(action)
            if ended.code != -signal.SIGKILL:
                break
            kills, again = kills + 1, (command.again,)
            if fault := half_published(command, folder, expected):
                yield f"{name}, killed after {moment:.3f} s: {fault}"
        if ended.code != 0:
            yield f"{name}: exit {ended.code} after {attempt} kills: {ended.err.strip()[-500:]}"
        elif comparable(command, folder) != expected:
            yield f"{name}: other files than without {attempt} kills"


def kill_at_changes(name: str, count: int, material: Path, work: Path, *, is_replaced: bool) -> Iterator[str]:
    """Faults found by killing a command before each of its last `count` changes of files.

    It writes to an empty place, or over an older output with --force.
    """
    command, before, folder = COMMANDS[name], work / "before", work / "trial"
    prepare(command, material, before)
    arguments = command.arguments
    if is_replaced:
        assert forked(lambda: command_line(command.arguments, before)).code == 0
        arguments = (*arguments, "--force")
    num_changes, expected = 0, None
    for from_end in range(-1, count):  # the first run is not killed, and counts
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        changes = mmap.mmap(-1, 4)
        stop_at = num_changes - from_end if from_end >= 0 else -1
        ended = forked(functools.partial(_watched, arguments, folder, changes, stop_at))
        if from_end < 0:
            assert ended.code == 0, ended.err
            num_changes, expected = memoryview(changes).cast("i")[0], comparable(command, folder)
        elif fault := _fault(command, folder, ended.code, expected, "--force" if is_replaced else command.again):
            yield f"{name}, killed {from_end} of {num_changes} changes before the end, {is_replaced=}: {fault}"


def _watched(arguments: Sequence[str], folder: Path, changes: mmap.mmap, stop_at: int) -> None:
    """Run a command that is killed before its `stop_at`-th change of a file in `folder`; `changes` counts them."""
    number, pid = memoryview(changes).cast("i"), os.getpid()

    def watch(event: str, details: tuple[Any, ...]) -> None:
        is_written = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
        if os.getpid() != pid or not (event in _CHANGES or is_written) or not isinstance(details[0], (str, bytes)):
            return
        name = os.fsdecode(details[0])
        if not os.path.isabs(name) or name.startswith(str(folder)):
            number[0] += 1
            if number[0] == stop_at:
                os.kill(pid, signal.SIGKILL)

    sys.addaudithook(watch)
    command_line(arguments, folder)


def _fault(command: Command, folder: Path, code: int, expected: Any, again: str) -> str | None:
    """What is wrong after a kill, and after the command was run again."""
    if code not in (-signal.SIGKILL, 0):  # 0: it took fewer changes than the run that counted
        return f"exit {code} instead of a kill"
    if fault := half_published(command, folder, expected):
        return fault
    ended = forked(lambda: command_line((*command.arguments, again), folder))
    if ended.code != 0:
        return f"exit {ended.code} with {again}: {ended.err.strip()[-400:]}"
    if comparable(command, folder) != expected:
        return "other files than without a kill"
    left = sorted(p.name for p in folder.iterdir() if p.name.startswith(f"{command.output}."))
    return f"left behind: {left}" if left else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="15 kills at random and 20 at changes of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    asked = parser.parse_args()
    rng, faults = random.Random(asked.seed), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        made = forked(lambda: make_material(work / "material"), patience_s=600)
        assert made.code == 0, made.err
        import_everything(work / "material")
        for name in asked.only:
            found = [*kill_at_random(name, 15 if asked.long else 2, rng, work / "material", work)]
            for is_replaced in (False,) if name == "batch" else (False, True):  # a batch has no --force
                count = 10 if asked.long else 2
                found += kill_at_changes(name, count, work / "material", work, is_replaced=is_replaced)
            print(f"{name}: {len(found)} faults", *found, sep="\n", flush=True)
            faults += found
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
