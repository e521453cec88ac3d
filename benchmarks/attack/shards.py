"""Kill the workers of one conversion, and what puts their parts together, and compare with a conversion by one process.

    python -m benchmarks.attack.shards --kills 25 --out FILE.json

For 1, 2, 5 and 13 workers: every part and --finish get a SIGKILL at moments drawn from the time that they take, up to
three times each, and go on with --resume, until so many kills have happened. Nothing may lie at the output before
--finish has published it, and then it has to be what one process writes, with nothing beside it. Two workers on one
part are begun at the same time: one of them has to end with exit code 8, and the part has to be whole.
"""

import functools
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import common
from benchmarks.attack.forked import begin, command_line, forked, killed
from benchmarks.attack.kills import comparable

_COUNTS = (1, 2, 5, 13)
_MOST = 3  # kills of one command
_SHARDS, _SHAPE = 17, (512, 512)


@dataclass(frozen=True, kw_only=True)
class Workers:
    """One number of workers: conversions done, kills of parts and of --finish, and what was wrong."""

    count: int
    conversions: int
    killed_parts: int
    killed_finishes: int
    faults: tuple[str, ...]


def make_source(folder: Path) -> Path:
    """17 files of one or two matrices, the embedding and its tied head in two of them."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(_SHAPE, generator=generator)
    files = [{"model.embed_tokens.weight": embedding}]
    for i in range(_SHARDS - 2):
        files.append({f"layers.{i}.{n}.weight": torch.randn(_SHAPE, generator=generator) for n in "ab"[: 1 + i % 2]})
    files.append({"lm_head.weight": embedding.clone()})
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name)
    index = {"metadata": {}, "weight_map": {t: n for n, tensors in zip(names, files, strict=True) for t in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "sharded", "tie_word_embeddings": True}))
    return folder


_FORM = ("--method", "collage", "--residual", "int8", "--verify", "weights", "--workers", "1", "-q")


def _command(*more: str) -> tuple[str, ...]:
    return ("convert", "source", *_FORM, "-o", "out", *more)


def _until_done(
    folder: Path, arguments: Sequence[str], takes_s: float, rng: random.Random, faults: list[str], *, publishes: bool
) -> int:
    """Kill a command, go on with --resume, and let it end; how many kills there were."""
    again: tuple[str, ...] = ()
    for kills in range(_MOST + 1):
        action = functools.partial(command_line, (*arguments, *again), folder)
        ended = killed(action, after_s=rng.uniform(0, 1.1 * takes_s)) if kills < _MOST else forked(action)
        if ended.code == 0:
            return kills
        if ended.code != -9:
            faults.append(f"{' '.join(arguments[-2:])}: exit {ended.code}: {ended.err.strip()[-300:]}")
            return kills
        if (folder / "out").exists() and not publishes:
            faults.append("a part published")
        again = ("--resume",)
    return _MOST


def _convert(work: Path, source: Path, count: int, takes_s: float, rng: random.Random, faults: list[str]) -> list[int]:
    """One conversion by `count` workers in `work`: kills of parts, and of --finish."""
    (work / "source").symlink_to(source)
    parts = 0
    for number in rng.sample(range(1, count + 1), count):
        arguments = _command("--shard", f"{number}/{count}")
        parts += _until_done(work, arguments, takes_s / min(count, 2), rng, faults, publishes=False)
    return [parts, _until_done(work, _command("--finish"), takes_s, rng, faults, publishes=True)]


def _race(work: Path, source: Path) -> str | None:
    """Two workers on one part at the same time; what was wrong."""
    (work / "source").symlink_to(source)
    both = [begin(functools.partial(command_line, _command("--shard", "1/2"), work)) for _ in range(2)]
    codes = sorted(b.end().code for b in both)
    if codes != [0, 8] or not (work / "out.parts" / "1-of-2" / "lpconv.json").exists():
        return f"exit codes {codes}"
    return None


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--kills", type=int, default=25, help="for each number of workers")
    parser.add_argument("--races", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rng, results = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        source = make_source(base / "source")
        _import_all()
        for name in ("warm", "alone"):  # the second is measured
            work = base / name
            work.mkdir()
            (work / "source").symlink_to(source)
            started = time.monotonic()
            assert forked(functools.partial(command_line, _command(), work)).code == 0
            takes_s = time.monotonic() - started
        expected = comparable(base / "alone" / "out")
        for count in _COUNTS:
            faults: list[str] = []
            kills, conversions = [0, 0], 0
            while sum(kills) < asked.kills and not faults:
                work = base / f"{count}-{conversions}"
                work.mkdir()
                found = _convert(work, source, count, takes_s, rng, faults)
                kills = [a + b for a, b in zip(kills, found, strict=True)]
                conversions += 1
                if comparable(work / "out") != expected:
                    faults.append("another output")
                beside = sorted(p.name for p in work.iterdir())
                if beside != ["out", "source"]:
                    faults.append(f"left over: {beside}")
            results.append(
                Workers(count=count, conversions=conversions, killed_parts=kills[0], killed_finishes=kills[1],
                        faults=tuple(faults))
            )  # fmt: skip
            print(results[-1], file=sys.stderr)
        races = []
        for number in range(asked.races):
            work = base / f"race-{number}"
            work.mkdir()
            races.append(_race(work, source))
    result = {
        "command": common.command(),
        "takes_s": round(takes_s, 3),
        "files": _SHARDS,
        "workers": [asdict(r) for r in results],
        "races": len(races),
        "race_faults": [r for r in races if r is not None],
    }
    print(json.dumps(result, indent=1))
    common.save(result, asked.out)
    sys.exit(any(r.faults for r in results) or any(races))


def _import_all() -> None:
    """Here, so that forked processes need not."""
    import lpconv.cli.progress
    import lpconv.convert.parts
    import lpconv.convert.run
    import lpconv.report.convert
    import lpconv.report.terminal  # noqa: F401


if __name__ == "__main__":
    main()
