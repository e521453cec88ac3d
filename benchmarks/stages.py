"""Where the processor time of a conversion goes, stage by stage, beside what bounds each stage.

    python benchmarks/stages.py CHECKPOINT [--format e4m3fn] [--granularity tensor] [--rounds 3] [--output FILE]

Every round converts the checkpoint in a process of its own. Each thread times its stages by its own clock, so waiting
for a lock, a disk or a core does not count, and what else the machine does counts only by what it takes of caches and
memory. The round with the least processor time in all counts.

A bound is what the bytes of a stage take where nothing else is done, on one core: to copy them once between buffers
that no cache holds, or to hash them. No stage is faster as long as it goes over the bytes that it does.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

__all__ = ["STAGES", "converted", "table"]

# What bounds a stage: to copy or to hash so many bytes that come in, or go out.
STAGES: dict[str, tuple[str, float, float] | None] = {
    "read the source": ("copy", 1, 0),
    "guess scales": None,
    "statistics": ("copy", 1, 0),
    "codes, and their error": ("copy", 1, 1),
    "write": ("copy", 0, 1),
    "hash": ("hash", 0, 1),
    "write back to the disk": None,
    "threads and records": None,
    "compare what was written": None,
    "plan and reports": None,
    "start": None,
}
_BUFFER = 64 * 2**20


def converted(source: Path, fmt: str, grain: str) -> dict[str, float]:
    """Processor seconds of each stage of a conversion in this process, and its bytes in and out."""
    from lpconv.checkpoint import partfile
    from lpconv.convert import run, verify_written
    from lpconv.convert.options import ConvertOptions
    from lpconv.convert.workers import Workers
    from lpconv.forms.scaled import Scaled
    from lpconv.forms.tiles import Tiles

    timed: list[tuple[Any, str, str]] = [
        (Workers, "read", "read the source"), (Workers, "guessed", "guess scales"),
        (Scaled, "look", "statistics"), (Tiles, "look", "statistics"),
        (Scaled, "encode", "codes, and their error"), (Tiles, "encode", "codes, and their error"),
        (partfile.PartFile, "write", "write"), (partfile.PartFile, "digest", "hash"),
        (partfile, "_write_back", "write back to the disk"),
    ]  # fmt: skip
    spent, phases, outermost = defaultdict[str, float](float), defaultdict[str, float](float), threading.local()

    def in_thread(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(outermost, "stage", None) or "write" not in phases or "verify" in phases:
                return function(*args, **kwargs)
            outermost.stage, started = stage, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[stage] += time.thread_time() - started
                outermost.stage = None

        return call

    def in_all(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            phases[phase] = -time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                phases[phase] += time.process_time()

        return call

    begun = time.process_time()
    with ExitStack() as patched, tempfile.TemporaryDirectory(dir=source.parent) as folder:
        for holder, name, stage in timed:
            patched.enter_context(patch.object(holder, name, in_thread(getattr(holder, name), stage)))
        for holder, name, phase in ((run, "_write_weights", "write"), (verify_written, "verify_written", "verify")):
            patched.enter_context(patch.object(holder, name, in_all(getattr(holder, name), phase)))
        options = ConvertOptions(method="unit", format=fmt, granularity=grain, verify="weights")
        result = run.convert(str(source), Path(folder) / "output", options)
    whole = time.process_time() - begun
    spent["threads and records"] = phases["write"] - sum(spent.values())
    spent["compare what was written"] = phases["verify"]
    spent["plan and reports"] = whole - phases["write"] - phases["verify"]
    spent["start"] = begun
    return {**{stage: spent[stage] for stage in STAGES}, "in": result.bytes.read, "out": result.bytes.written}


def _bounds() -> dict[str, float]:
    """Seconds that a byte takes to be copied and to be hashed."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.ones(_BUFFER, dtype=torch.uint8), torch.ones(_BUFFER, dtype=torch.uint8)
    raw = a.numpy().data
    work: dict[str, Callable[[], object]] = {"copy": lambda: b.copy_(a), "hash": lambda: hashlib.sha256(raw)}
    return {name: min(_seconds(do) for _ in range(5)) / _BUFFER for name, do in work.items()}


def _seconds(do: Callable[[], object]) -> float:
    started = time.process_time()
    do()
    return time.process_time() - started


def table(found: dict[str, float], bounds: dict[str, float]) -> str:
    """Markdown: a row for each stage, nanoseconds by bytes of the source."""
    whole, size = sum(found[s] for s in STAGES), found["in"]
    lines = ["| stage | CPU s | share | ns a byte in | bound, ns | of |", "|---|---|---|---|---|---|"]
    for stage, bound in STAGES.items():
        kind, of_in, of_out = bound or ("", 0, 0)
        least = bounds[kind] * (of_in + of_out * found["out"] / size) * 1e9 if kind else None
        limit = f"{least:.3f} | {kind}" if least is not None else " | "
        lines.append(f"| {stage} | {found[stage]:.2f} | {found[stage] / whole:.0%} | {found[stage] / size * 1e9:.3f} | "
                     f"{limit} |")  # fmt: skip
    return "\n".join([*lines, f"| all | {whole:.2f} | 100% | {whole / size * 1e9:.3f} | | |"]) + "\n"


def _child(source: Path, fmt: str, grain: str) -> dict[str, float]:
    command = [sys.executable, __file__, str(source), "--format", fmt, "--granularity", grain, "--child"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--format", default="e4m3fn")
    parser.add_argument("--granularity", default="tensor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    source = args.checkpoint.resolve()
    if args.child:
        print(json.dumps(converted(source, args.format, args.granularity)))
        return
    rounds = [_child(source, args.format, args.granularity) for _ in range(args.rounds)]
    best, bounds = min(rounds, key=lambda found: sum(found[s] for s in STAGES)), _bounds()
    print(table(best, bounds), end="")
    if args.output:
        words = f"--format {args.format} --granularity {args.granularity} --rounds {args.rounds}"
        document = {"command": f"python benchmarks/stages.py CHECKPOINT {words}", "cores": len(os.sched_getaffinity(0)),
                    "load_average": os.getloadavg()[0], "bounds_s": bounds, "rounds": rounds}  # fmt: skip
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main()
