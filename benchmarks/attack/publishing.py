"""Kill every command that writes a folder at its last changes of files, and go on with --force or --resume.

    python -m benchmarks.attack.publishing --count 20 --out FILE.json

A run that nobody kills counts its changes of files (created, renamed, deleted). Then the command is ended by SIGKILL
before each of the last ones, half in an empty place, half where an older output is replaced. After that, nothing
half-written may lie in its place, and the command with --force, or --resume where it has that, has to make the same
bytes; the same files for probe, advise and demo, whose records are full of times.
"""

import functools
import json
import mmap
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.attack.forked import command_line, forked, import_everything
from benchmarks.attack.fuzz_material import PROBE, make_material
from benchmarks.attack.kills import COMMANDS, comparable

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")  # events of Python's audit hooks
_MARKERS = {"probe": "probe.json", "advise": "advice.json"}


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A command that writes a folder: its arguments, what goes on, where it writes, and what it reads."""

    arguments: tuple[str, ...]
    again: str
    output: str = "out"
    reads: tuple[str, ...] = ()
    is_timed: bool = False


def folders() -> dict[str, Folder]:
    """Every command that writes a folder, by a name."""
    found = {
        name: Folder(arguments=c.arguments, again=c.again, output=c.output, reads=c.reads)
        for name, c in COMMANDS.items()
    }
    advise = ("advise", "llama", "--for", "infer", "--seq-len", "16", "-q", "-o", "out")
    return found | {
        "decode": Folder(arguments=("restore", "nvfp4", "-q", "-o", "out"), again="--force", reads=("nvfp4",)),
        "probe": Folder(arguments=("probe", "llama", *PROBE, "--calibrate", "-o", "out"), again="--force",
                        reads=("llama",), is_timed=True),
        "advise": Folder(arguments=advise, again="--force", reads=("llama",), is_timed=True),
        "demo": Folder(arguments=("demo", "-q", "-o", "out"), again="--force", is_timed=True),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A kill before the change of a file that is the `from_end`-th from the end; `fault` is None if all went on."""

    command: str
    is_replaced: bool
    from_end: int
    num_changes: int
    fault: str | None


def kill_at_publishing(name: str, count: int, material: Path, work: Path) -> list[Moment]:
    """Kill a command at `count` moments, half of them while it replaces an older output; at least once in each case."""
    command, found = folders()[name], list[Moment]()
    before, folder = work / "before", work / "trial"
    places = (False,) if name == "batch" else (False, True)  # a batch has no --force
    for is_replaced in places:
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir()
        for read in command.reads:
            shutil.copytree(material / read, before / read, ignore=shutil.ignore_patterns("out", "*.lock*"))
        if is_replaced:
            _must(forked(lambda: command_line(command.arguments, before)).code, "an older output")
        arguments = (*command.arguments, *(["--force"] if is_replaced else []))
        num_changes, expected = 0, None
        for from_end in range(-1, max(1, count // len(places))):  # the first one counts, and is not killed
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(before, folder)
            counts = mmap.mmap(-1, 4)
            at = num_changes - from_end if from_end >= 0 else -1
            ended = forked(functools.partial(_watched, arguments, folder, counts, at))
            if from_end < 0:
                _must(ended.code, ended.err)
                num_changes, expected = memoryview(counts).cast("i")[0], _state(command, folder)
                continue
            fault = _fault(name, command, arguments, folder, ended.code, expected, is_replaced=is_replaced)
            found.append(
                Moment(command=name, is_replaced=is_replaced, from_end=from_end, num_changes=num_changes, fault=fault)
            )
            if fault:
                print(json.dumps(asdict(found[-1])), flush=True)
    return found


def _must(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"exit {code}: {what}")


def _watched(arguments: Sequence[str], folder: Path, counts: mmap.mmap, stop_at: int) -> None:
    """The command, killed before its `stop_at`-th change of a file below `folder`; `counts` gets their number."""
    number, pid = memoryview(counts).cast("i"), os.getpid()

    def watch(event: str, details: tuple[Any, ...]) -> None:
        is_written = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
        if os.getpid() != pid or not (event in _CHANGES or is_written) or not isinstance(details[0], (str, bytes)):
            return
        name = os.fsdecode(details[0])
        if os.path.isabs(name) and not name.startswith(str(folder)):
            return
        number[0] += 1
        if number[0] == stop_at:
            os.kill(pid, signal.SIGKILL)

    sys.addaudithook(watch)
    command_line(arguments, folder)


def _state(command: Folder, folder: Path) -> Any:
    found = comparable(folder / command.output)
    return sorted(found) if command.is_timed else found


def _fault(
    name: str, command: Folder, arguments: Sequence[str], folder: Path, code: int, expected: Any, *, is_replaced: bool
) -> str | None:
    """What is wrong after a kill, and after the command has been given again."""
    if code not in (-9, 0):  # 0: it took fewer changes than the run that counted
        return f"exit {code} instead of a kill"
    marker = folder / command.output / _MARKERS.get(name, "lpconv.json")
    if name not in ("finetune", "batch", "demo") and marker.exists() and _state(command, folder) != expected:
        return "half an output after a kill"
    again = [a for a in arguments if a != "--force"]
    ended = forked(lambda: command_line((*again, "--force" if is_replaced else command.again), folder))
    if ended.code != 0:
        return f"exit {ended.code} of {command.again}: {ended.err.strip()[-400:]}"
    if _state(command, folder) != expected:
        return "other files than without a kill"
    left = sorted(p.name for p in folder.iterdir() if p.name.startswith(f"{command.output}."))
    return f"left behind: {left}" if left else None


def main() -> None:
    parser = common.parser(__doc__, work="a folder to keep; the material in it is used again")
    parser.add_argument("--count", type=int, default=20, help="kills of each command")
    parser.add_argument("--only", nargs="*", default=list(folders()))
    args = parser.parse_args()
    result = common.load(args.out) if args.out and args.out.exists() else {}  # of other commands
    with common.work_folder(args.work) as work:
        material = work / "material"
        if not material.exists():
            _must(forked(lambda: make_material(material), patience_s=600).code, "material")
        import_everything(material)
        for name in args.only:
            found = kill_at_publishing(name, args.count, material, work)
            faults = [asdict(m) for m in found if m.fault]
            result[name] = {"kills": len(found), "changes_of_files": found[-1].num_changes, "faults": faults}
            print(name, len(found), len(faults), flush=True)
            common.save(result, args.out)


if __name__ == "__main__":
    main()
