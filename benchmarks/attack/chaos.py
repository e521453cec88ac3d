"""Run commands of lpconv on disks that fill up, fail, are slow and interrupt, with a clock that jumps and two writers.

    python -m benchmarks.attack.chaos --count 300 --out FILE.json

A shared library (`chaos_shim.c`, built with cc and preloaded) makes calls to the C library fail in files below the
folder of a run: no space, input/output errors, interruptions, half reads and writes, waits, jumps of the wall clock by
up to a day. A command may end in the right bytes, or in an exit code of `docs/cli.md` other than 1 and a hint; its
sources, and an older output in its place, are not changed; and given again, undisturbed, it makes the right bytes.
"""

import ctypes
import functools
import json
import mmap
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.attack.forked import Ended, begin, command_line, forked, import_everything
from benchmarks.attack.fuzz import fault_of
from benchmarks.attack.fuzz_material import make_material
from benchmarks.attack.kills import COMMANDS, comparable, prepare, undisturbed

# The letters of the shim, in its order.
KINDS = {"s": "disk full", "i": "EIO", "n": "EINTR", "h": "half reads and writes", "w": "slow", "c": "clock jumps"}
_SHIM = Path(__file__).with_name("chaos_shim.c")


@dataclass(frozen=True, kw_only=True)
class Upset:
    """One command in chaos: the exit codes of its writers, and what is wrong, None where nothing is."""

    number: int
    command: str
    kinds: str
    share: int
    codes: tuple[int, ...]
    struck: Mapping[str, int]
    fault: str | None


def chaos(numbers: Sequence[int], seed: int, work: Path) -> list[Upset]:
    """Upset the runs of these numbers; this process must have been started with the shim."""
    material = work / "material"
    if not material.exists():
        made = forked(lambda: make_material(material), patience_s=600)
        assert made.code == 0, made.err
    import_everything(material)
    expected = {name: undisturbed(name, material, work / "trial")[0] for name in COMMANDS}
    found = []
    for number in numbers:
        found.append(_upset(number, random.Random(f"{seed}/{number}"), material, work / "trial", expected))
        if found[-1].fault:
            print(json.dumps(asdict(found[-1])), flush=True)
    return found


def _upset(number: int, rng: random.Random, material: Path, folder: Path, expected: Mapping[str, Any]) -> Upset:
    name = rng.choice(list(COMMANDS))
    command = COMMANDS[name]
    prepare(command, material, folder)
    is_replaced = command.output == "out" and name != "finetune" and rng.random() < 0.3
    if is_replaced:
        made = forked(lambda: command_line(command.arguments, folder))
        assert made.code == 0, made.err
    sources = {n: _bytes(folder / n) for n in command.reads if n != command.output}
    kinds = "".join(rng.sample(list(KINDS), rng.randrange(1, len(KINDS) + 1)))
    share = rng.choice((5, 20, 50, 200, 1000))
    arguments = (*command.arguments, *(["--force"] if is_replaced else []))
    counts = mmap.mmap(-1, 4 * len(KINDS))
    seeds = [rng.randrange(2**32) for _ in range(2 if rng.random() < 0.25 else 1)]
    run = functools.partial(_run_upset, arguments, folder, kinds, share, counts)
    ended = [begun.end() for begun in [begin(functools.partial(run, one)) for one in seeds]]
    struck = dict(zip(KINDS.values(), memoryview(counts).cast("i"), strict=True))
    fault = next((f for e in ended if (f := fault_of(arguments, e))), None)
    fault = fault or _lost(name, folder, sources, expected[name], ended, is_replaced=is_replaced)
    return Upset(
        number=number, command=" ".join(arguments), kinds=kinds, share=share, codes=tuple(e.code for e in ended),
        struck=struck, fault=fault,
    )  # fmt: skip


def _run_upset(arguments: Sequence[str], folder: Path, kinds: str, share: int, counts: mmap.mmap, seed: int) -> None:
    shim: Any = ctypes.CDLL(None)
    address = ctypes.c_int.from_buffer(counts)
    shim.chaos_begin(str(folder).encode(), kinds.encode(), share, ctypes.c_uint64(seed), ctypes.byref(address))
    command_line(arguments, folder)


def _lost(
    name: str,
    folder: Path,
    sources: Mapping[str, Any],
    expected: Mapping[str, Any],
    ended: Sequence[Ended],
    *,
    is_replaced: bool,
) -> str | None:
    """What is not as it should be after the chaos, and after the command has been given again."""
    command = COMMANDS[name]
    output = folder / command.output
    changed = [n for n, before in sources.items() if _bytes(folder / n) != before]
    if changed:
        return f"source changed: {changed[0]}"
    if (is_replaced or any(e.code == 0 for e in ended)) and comparable(output) != expected:
        kept = output.with_name("out.replaced")  # killed between two renames, it would lie there
        if not (kept.exists() and comparable(kept) == expected):
            return "success, or an older output, with other bytes"
    again = "--force" if is_replaced else command.again
    done = forked(lambda: command_line((*command.arguments, again), folder))
    if done.code != 0:
        return f"undisturbed, exit {done.code}: {done.err.strip()[-500:]}"
    return None if comparable(output) == expected else "undisturbed, other bytes"


def _bytes(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _summary(found: Sequence[Upset], seed: int) -> dict[str, Any]:
    struck: Counter[str] = Counter()
    for upset in found:
        struck.update(upset.struck)
    codes = Counter(code for upset in found for code in upset.codes)
    return {
        "command": common.command(),
        "seed": seed,
        "runs": len(found),
        "two_writers": sum(len(u.codes) == 2 for u in found),
        "faults_injected": dict(struck),
        "exit_codes": dict(sorted(codes.items())),
        "faults": [asdict(u) for u in found if u.fault],
    }


def _with_shim(work: Path) -> None:
    """Start this command again with the shim, unless that has been done."""
    library = work / "shim.so"
    if os.environ.get("LD_PRELOAD") == str(library):
        del os.environ["LD_PRELOAD"]  # children of the commands need none
        return
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SHIM), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.attack.chaos", *sys.argv[1:], "--work", str(work)])


def main() -> None:
    parser = common.parser(__doc__, work="a folder to keep; the material in it is used again")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with common.work_folder(args.work) as work:
        _with_shim(work)
        result = _summary(chaos(args.only or range(args.count), args.seed, work), args.seed)
    print(json.dumps({**result, "faults": len(result["faults"])}, indent=1))
    common.save(result, args.out)


if __name__ == "__main__":
    main()
