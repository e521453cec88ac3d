"""Run commands of lpconv on damaged files, with odd options and unwritable outputs, and check how they end.

    python -m tests.faults.fuzz                   # a minute
    python -m tests.faults.fuzz --long --seed 1   # hours
    python -m tests.faults.fuzz --only 1234       # one input again

Every input is one command line in a folder of its own, run by a process that is forked from one which has imported
everything, and depends on nothing but the seed and its number. A command may succeed, or end with an exit code of
`docs/cli.md` other than 1, an `error:` and a `hint:`, and nothing finished where it was to write; under --json stdout
then holds one document with that code. Anything else is a fault: a traceback, exit code 1, a signal, or a run that
takes more than five minutes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer.main

from lpconv.cli.main import app
from tests.faults.forked import Ended, command_line, forked, import_everything
from tests.faults.fuzz_inputs import ATTACKS
from tests.faults.material import make_material

_CODES = {0, 2, 3, 4, 5, 6, 7, 8}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command did with an input; `fault` says what is wrong with that, or is None."""

    number: int
    attack: str
    arguments: tuple[str, ...]
    wrong: str
    code: int
    fault: str | None
    said: str


def fuzz(numbers: Sequence[int], seed: int, work: Path) -> list[Outcome]:
    """Try the inputs of these numbers; all files are written to `work`."""
    material = work / "material"
    made = forked(lambda: make_material(material), patience_s=600)
    assert made.code == 0, made.err
    import_everything(material)
    return [_try(number, seed, material, work / "trial") for number in numbers]


def _try(number: int, seed: int, material: Path, folder: Path) -> Outcome:
    rng = random.Random(f"{seed}/{number}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    attack = rng.choices(list(ATTACKS), [weight for weight, _ in ATTACKS.values()])[0]
    trial = ATTACKS[attack][1](rng, material, folder)
    before = {o for o in trial.outputs if o.exists()}
    ended = forked(lambda: command_line(trial.arguments, folder), file_bytes=trial.file_bytes)
    fault = fault_of(trial.arguments, ended) or next(
        (f"published {o.name}" for o in trial.outputs if ended.code and o not in before and is_finished(o)), None
    )
    return Outcome(
        number=number, attack=attack, arguments=trial.arguments, wrong=trial.wrong, code=ended.code,
        fault=fault, said=ended.err[-3000:],
    )  # fmt: skip


def fault_of(arguments: Sequence[str], ended: Ended) -> str | None:
    """What is wrong with the way a command ended, or None."""
    code, out, err = ended.code, ended.out, ended.err
    if code < 0:
        stack = [line.strip() for line in err.splitlines() if line.startswith("  File ")][:3]
        return "too slow" if code == -signal.SIGALRM else " ".join([f"killed by signal {-code}", *stack])
    if "Traceback" in err:
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
    """Whether `--json` is an option here, and not the value of the option before it."""
    if "--json" not in arguments:
        return False
    parameters = typer.main.get_command(app).commands[arguments[0]].params  # type: ignore[attr-defined]
    takes_value = {o for p in parameters for o in p.opts if o.startswith("-") and not getattr(p, "is_flag", False)}
    return any(a == "--json" and arguments[i] not in takes_value for i, a in enumerate(arguments[1:]))


def is_finished(output: Path) -> bool:
    """Whether the file that a command writes last exists."""
    if not output.is_dir():
        return output.exists()
    return any((output / n).exists() for n in ("lpconv.json", "probe.json", "report.json", "model.onnx"))


@contextmanager
def _small_disks(work: Path) -> Iterator[None]:
    """Mount a full and a read-only file system next to the material; they stay folders if mounting fails."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="5,000 inputs instead of 100")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of inputs to repeat, with what the commands say")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    numbers = asked.only or range(asked.first, asked.first + (5000 if asked.long else 100))
    os.environ |= {"COLUMNS": "100", "HF_HUB_OFFLINE": "1", "LPCONV_COMPILE": "never"}
    with tempfile.TemporaryDirectory() as folder, _small_disks(Path(folder)):
        results = fuzz(numbers, asked.seed, Path(folder))
    for r in results:
        if r.fault or asked.only:
            print(f"{r.number}: {r.fault}: exit {r.code}: {' '.join(r.arguments)} [{r.wrong}]\n{r.said[-1500:]}")
    codes = Counter((r.attack, r.code) for r in results)
    for attack in ATTACKS:
        print(attack, {code: n for (kind, code), n in sorted(codes.items()) if kind == attack})
    sys.exit(any(r.fault for r in results))


if __name__ == "__main__":
    main()
