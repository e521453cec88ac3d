"""Give every command of lpconv damaged files, odd options and places that cannot be written, and see what it says.

    python -m benchmarks.attack.fuzz --count 5000 --out FILE.json
    python -m benchmarks.attack.fuzz --only 1234 --show

Every input is one command line in a folder of its own, run by a process that is forked from one which has imported
everything, and depends on nothing but the seed and its number. A command may succeed, or end with an exit code of
`docs/cli.md` other than 1, an `error:` and a `hint:`, and nothing finished where it was to write; under --json stdout
then holds one document with that code. Anything else is a fault: a traceback, exit code 1, a signal, an hour glass.
"""

import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer.main

from benchmarks import common
from benchmarks.attack.forked import Ended, command_line, forked, import_everything
from benchmarks.attack.fuzz_inputs import ATTACKS
from benchmarks.attack.fuzz_material import make_material
from lpconv.cli.main import app

_CODES = {0, 2, 3, 4, 5, 6, 7, 8}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of an input; `fault` says what is wrong with that, None where nothing is."""

    number: int
    attack: str
    arguments: tuple[str, ...]
    wrong: str
    code: int
    seconds: float
    fault: str | None
    said: str


def fuzz(numbers: Sequence[int], seed: int, work: Path, *, quiet: bool = False) -> list[Found]:
    """Try the inputs of these numbers; `work` is a folder for all files."""
    material = work / "material"
    if not material.exists():
        made = forked(lambda: make_material(material), patience_s=600)
        assert made.code == 0, made.err
    import_everything(material)
    found = []
    for number in numbers:
        one = _try(number, seed, material, work / "trial")
        found.append(one)
        if not quiet and one.fault:
            print(f"{number}: {one.fault}: {' '.join(one.arguments)} [{one.wrong}]\n{one.said[-1500:]}", flush=True)
        if not quiet and len(found) % 250 == 0:
            print(f"{len(found)} of {len(numbers)}, {sum(f.fault is not None for f in found)} faults", flush=True)
    return found


def _try(number: int, seed: int, material: Path, folder: Path) -> Found:
    rng = random.Random(f"{seed}/{number}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    attack = rng.choices(list(ATTACKS), [weight for weight, _ in ATTACKS.values()])[0]
    trial = ATTACKS[attack][1](rng, material, folder)
    before = {o for o in trial.outputs if o.exists()}
    started = time.monotonic()
    ended = forked(lambda: command_line(trial.arguments, folder), file_bytes=trial.file_bytes)
    seconds = time.monotonic() - started
    fault = fault_of(trial.arguments, ended) or next(
        (f"published {o.name}" for o in trial.outputs if ended.code and o not in before and is_finished(o)), None
    )
    return Found(
        number=number, attack=attack, arguments=trial.arguments, wrong=trial.wrong, code=ended.code,
        seconds=round(seconds, 3), fault=fault, said=ended.err[-3000:],
    )  # fmt: skip


def fault_of(arguments: Sequence[str], ended: Ended) -> str | None:
    """What is wrong with the way a command ended, None where nothing is."""
    code, out, err = ended.code, ended.out, ended.err
    if code < 0:
        stack = [line.strip() for line in err.partition("Current thread")[2].splitlines()[1:4]]
        return "too slow" if code == -signal.SIGALRM else " ".join([f"killed by signal {-code}", *stack])
    if "Traceback (most recent call last)" in err:
        return f"traceback, exit {code}: {err.strip().splitlines()[-1]}"
    if code not in _CODES:
        return f"exit {code}"
    if code == 0:
        return None
    if asks_json(arguments):
        try:
            if json.loads(out)["error"]["code"] != code:
                return "another code in JSON"
        except (ValueError, KeyError, TypeError):
            return "no JSON document"
    is_parsed = "Usage: " in err  # typer's words, which name the option and --help
    return None if is_parsed or ("error: " in err and "hint: " in err) else "no hint"


def asks_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` stands there as an option, and not as what an option before it is given."""
    if "--json" not in arguments:
        return False
    parameters = typer.main.get_command(app).commands[arguments[0]].params  # type: ignore[attr-defined]
    takes_value = {o for p in parameters for o in p.opts if o.startswith("-") and not getattr(p, "is_flag", False)}
    return any(a == "--json" and arguments[i] not in takes_value for i, a in enumerate(arguments[1:]))


def is_finished(output: Path) -> bool:
    """Whether something that a command writes last is there."""
    if not output.is_dir():
        return output.exists()
    return any((output / n).exists() for n in ("lpconv.json", "probe.json", "report.json", "model.onnx"))


@contextmanager
def _small_disks(work: Path) -> Iterator[None]:
    """File systems without room, and without leave to write, beside the material; folders if mounting fails."""
    folders = {"full": "size=64k", "ro": "ro"}
    mounted = []
    for name, how in folders.items():
        (work / name).mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(work / name)]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            mounted.append(work / name)
    try:
        yield
    finally:
        for folder in mounted:
            subprocess.run(["umount", str(folder)], check=True)


def summary(found: Sequence[Found], seed: int) -> dict[str, Any]:
    """The figures of a run: exit codes by kind of attack, faults, and the slowest refusals."""
    refused = sorted((f for f in found if f.code), key=lambda f: -f.seconds)
    kinds: Mapping[str, Counter[int]] = {a: Counter(f.code for f in found if f.attack == a) for a in ATTACKS}
    return {
        "command": common.command(),
        "seed": seed,
        "inputs": len(found),
        "faults": [asdict(f) for f in found if f.fault],
        "exit_codes": {kind: dict(sorted(counts.items())) for kind, counts in kinds.items()},
        "by_command": _by_command(found),
        "seconds": {n: round(sum(f.seconds for f in found if f.arguments[0] == n), 1) for n in _by_command(found)},
        "median_refusal_s": refused[len(refused) // 2].seconds if refused else None,
        "slowest_refusals": [
            {"seconds": f.seconds, "code": f.code, "arguments": f.arguments, "wrong": f.wrong} for f in refused[:5]
        ],
    }


def _by_command(found: Sequence[Found]) -> dict[str, dict[int, int]]:
    names = sorted({f.arguments[0] for f in found})
    return {n: dict(sorted(Counter(f.code for f in found if f.arguments[0] == n).items())) for n in names}


def main() -> None:
    parser = common.parser(__doc__, work="a folder to keep; the material in it is used again")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what every command said")
    args = parser.parse_args()
    numbers = args.only or range(args.first, args.first + args.count)
    with common.work_folder(args.work, COLUMNS="100") as work, _small_disks(work):
        found = fuzz(numbers, args.seed, work)
    if args.show:
        for f in found:
            print(f"{f.number}: exit {f.code}, {f.seconds} s: lpconv {' '.join(f.arguments)} [{f.wrong}]\n{f.said}")
    result = summary(found, args.seed)
    print(json.dumps({**result, "faults": len(result["faults"])}, indent=1))
    common.save(result, args.out)


if __name__ == "__main__":
    main()
