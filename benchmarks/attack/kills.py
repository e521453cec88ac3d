"""Kill commands of lpconv at random moments, go on, and compare what comes out with a run that nobody killed.

    python -m benchmarks.attack.kills --count 100 --out FILE.json

A command is killed by SIGKILL at a moment drawn from the time that it takes, and begun again: with --resume where it
has that, else with --force; up to five times, and then let run. After a kill nothing that looks finished may lie in its
place, unless it is; and in the end there have to be the same bytes, but for records of time and memory.
"""

import functools
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.attack.forked import command_line, forked, import_everything, killed
from benchmarks.attack.fuzz_material import TUNE, make_material

_MOST = 5  # kills of one command
_TUNED = ("--save-every", "1", "--eval-every", "1", *TUNE, "--steps", "4")


@dataclass(frozen=True, kw_only=True)
class _Command:
    """Arguments, what goes on with a killed run, where it writes, and the folders of the material that it reads."""

    arguments: tuple[str, ...]
    again: str
    output: str
    reads: tuple[str, ...]


COMMANDS: Mapping[str, _Command] = {
    "convert": _Command(
        arguments=("convert", "sharded", "--format", "e4m3fn", "--verify", "weights", "-q", "-o", "out"),
        again="--resume", output="out", reads=("sharded",),
    ),
    "nvfp4": _Command(
        arguments=("convert", "sharded", "--format", "e2m1", "--granularity", "nvfp4", "--layout", "compressed-tensors",
                   "--verify", "weights", "-q", "-o", "out"),
        again="--resume", output="out", reads=("sharded",),
    ),
    "calibrate": _Command(
        arguments=("convert", "llama", "--format", "e2m1", "--granularity", "nvfp4", "--layout", "compressed-tensors",
                   "--calibrate", "demo", "--verify", "weights", "-q", "-o", "out"),
        again="--resume", output="out", reads=("llama",),
    ),
    "gptq": _Command(
        arguments=("convert", "llama", "--format", "int4", "--granularity", "group:16", "--rounding", "gptq",
                   "--calibrate", "demo", "--calibration-tokens", "1024", "--verify", "weights", "-q", "-o", "out"),
        again="--resume", output="out", reads=("llama",),
    ),
    "init": _Command(
        arguments=("init", "llama", "--reinit", "-q", "-o", "out"), again="--force", output="out", reads=("llama",)
    ),
    "restore": _Command(
        arguments=("restore", "collage", "-q", "-o", "out"), again="--force", output="out", reads=("collage",)
    ),
    "finetune": _Command(
        arguments=("finetune", "llama", "--recipe", "collage-bf16", *_TUNED, "-o", "out"),
        again="--resume", output="out", reads=("llama",),
    ),
    "export": _Command(
        arguments=("export", "onnx", "unit", "-q", "-o", "out"), again="--force", output="out", reads=("unit",)
    ),
    "batch": _Command(
        arguments=("batch", "batch/jobs.yaml", "-q"), again="--resume", output="batch", reads=("batch",)
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One command, killed `kills` times and then done; `fault` says what is wrong, None where nothing is."""

    command: str
    kills: int
    moments_s: tuple[float, ...]
    fault: str | None


def comparable(output: Path) -> dict[str, Any]:
    """The files of an output, without times, memory and places, which differ between runs, and what was set aside."""
    timed = {"report.json", "report.html", "journal.jsonl"}
    if (output / "finetune.json").exists():
        timed |= {"README.md", "run.json", "SHA256SUMS"}
    found: dict[str, Any] = {}
    for path in sorted(p for p in output.rglob("*") if p.is_file()):
        name = path.relative_to(output).as_posix()
        if path.name in timed or any(part.endswith(".failed") for part in path.relative_to(output).parts):
            continue
        found[name] = _rows(path) if path.name == "metrics.jsonl" else path.read_bytes()
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """Metrics without times and memory."""
    rows = map(json.loads, path.read_text().splitlines())
    return [{k: v for k, v in row.items() if k in ("step", "loss", "eval_loss", "lr", "grad_norm")} for row in rows]


def kill_chain(
    name: str, rng: random.Random, material: Path, folder: Path, expected: Mapping[str, Any], takes_s: float
) -> Chain:
    """Kill a command up to five times, and then let it end."""
    command = COMMANDS[name]
    prepare(command, material, folder)
    moments: list[float] = []
    again: tuple[str, ...] = ()
    fault = None
    while fault is None:
        action = functools.partial(command_line, (*command.arguments, *again), folder)
        moment = rng.uniform(0, 1.05 * takes_s)
        ended = killed(action, after_s=moment) if len(moments) < _MOST else forked(action)
        if ended.code == 0:
            break
        if ended.code != -9:
            fault = f"exit {ended.code} after {len(moments)} kills: {ended.err.strip()[-500:]}"
            break
        moments.append(round(moment, 3))
        again = (command.again,)
        fault = _half_published(command, folder, expected)
    if fault is None:
        found = comparable(folder / command.output)
        wrong = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
        fault = f"not the same: {', '.join(wrong[:5])}" if wrong else None
    return Chain(command=name, kills=len(moments), moments_s=tuple(moments), fault=fault)


def _half_published(command: _Command, folder: Path, expected: Mapping[str, Any]) -> str | None:
    """What a kill left in the place of an output that appears whole, unless it is whole."""
    output = folder / command.output
    if command.arguments[0] in ("finetune", "batch") or not output.exists():
        return None
    return None if comparable(output) == expected else "half an output after a kill"


def prepare(command: _Command, material: Path, folder: Path) -> None:
    """An empty folder with what a command reads."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in command.reads:
        shutil.copytree(material / name, folder / name, ignore=shutil.ignore_patterns("out", "*.lock*"))


def undisturbed(name: str, material: Path, folder: Path) -> tuple[dict[str, Any], float]:
    """What a command makes when nobody kills it, and the seconds it takes."""
    command = COMMANDS[name]
    prepare(command, material, folder)
    started = time.monotonic()
    ended = forked(lambda: command_line(command.arguments, folder))
    assert ended.code == 0, ended.err
    return comparable(folder / command.output), time.monotonic() - started


def _run(names: Sequence[str], count: int, seed: int, work: Path) -> list[Chain]:
    material = work / "material"
    if not material.exists():
        made = forked(lambda: make_material(material), patience_s=600)
        assert made.code == 0, made.err
    import_everything(material)
    rng = random.Random(seed)
    found: list[Chain] = []
    for name in names:
        expected, takes_s = undisturbed(name, material, work / "trial")
        again, _ = undisturbed(name, material, work / "trial")
        assert expected == again, f"{name} does not repeat itself"
        while sum(c.kills for c in found if c.command == name) < count / len(names):
            found.append(kill_chain(name, rng, material, work / "trial", expected, takes_s))
            print(json.dumps(asdict(found[-1])), flush=True)
    return found


def _summary(found: Sequence[Chain], seed: int) -> dict[str, Any]:
    names = dict.fromkeys(c.command for c in found)
    return {
        "command": common.command(),
        "seed": seed,
        "kills": {name: sum(c.kills for c in found if c.command == name) for name in names},
        "chains": {name: sum(c.command == name for c in found) for name in names},
        "faults": [asdict(c) for c in found if c.fault],
    }


def main() -> None:
    parser = common.parser(__doc__, work="a folder to keep; the material in it is used again")
    parser.add_argument("--count", type=int, default=100, help="kills in all, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=tuple(COMMANDS), help="the commands to kill")
    args = parser.parse_args()
    with common.work_folder(args.work) as work:
        result = _summary(_run(args.only, args.count, args.seed, work), args.seed)
    print(json.dumps(result, indent=1))
    common.save(result, args.out)


if __name__ == "__main__":
    main()
