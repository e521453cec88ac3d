"""What finer scales cost in time and memory beside one scale for a tensor.

    python benchmarks/rates.py [--rounds 9] [--convert CHECKPOINT] [--output benchmarks/results/rates.json]

Rates are weights per second of processor time on one core: the first pass and the codes of a matrix in memory, without
reading, hashing or writing. Forms take turns within a round, and a form is compared with one scale in the same round;
the best round counts, so that other work on the machine disturbs least. `--convert` also converts a checkpoint once for
each form, in a process of its own with its check of the weights, for peak memory and processor time.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lpconv.formats.grains import grain_of
from lpconv.formats.spec import FORMATS
from lpconv.forms.blocks import Workspace
from lpconv.forms.compressed import CompressedTiles
from lpconv.forms.facts import Settings
from lpconv.forms.form import Form
from lpconv.forms.ranges import block_ranges

_SHAPE = (2048, 4096)
_ASKED = (
    ("e4m3fn", "tensor", "pow2"), ("e4m3fn", "row", "pow2"), ("e4m3fn", "row", "exact"), ("e4m3fn", "128x128", "pow2"),
    ("e4m3fn", "mx", "pow2"), ("e2m1", "mx", "pow2"), ("e2m1", "nvfp4", "pow2"), ("int8", "group:128", "exact"),
    ("int4", "group:128", "exact"), ("int4", "group:32", "pow2"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rate:
    """`per_second` weights of one core; `share` of the rate with one scale in the same round, the best of all."""

    dtype: str
    format: str
    granularity: str
    scale: str
    per_second: float
    share: float


def seconds(form: Form, x: Tensor, work: Workspace) -> float:
    """Processor time of the first pass and all codes of a matrix, 1-D."""
    blocks = [(x[start:stop], start) for start, stop in block_ranges(x.numel(), form.cols)]
    started = time.process_time()
    found = form.measure(lambda job: [job(block, start, work) for block, start in blocks])
    for block, start in blocks:
        form.encode(block, start, found, work)
    return time.process_time() - started


def rates(dtype: torch.dtype, rounds: int) -> list[Rate]:
    x = (torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype).view(-1)
    forms = [
        CompressedTiles.of("weight", _SHAPE, FORMATS[f], Settings(scale=s, grain=grain_of(g))) for f, g, s in _ASKED
    ]
    work = Workspace()
    times = torch.tensor([[seconds(f, x, work) for f in forms] for _ in range(rounds + 1)], dtype=torch.float64)[1:]
    best = times.amin(0)
    return [
        Rate(dtype=str(dtype).removeprefix("torch."), format=f, granularity=g, scale=s,
             per_second=x.numel() / float(best[i]), share=float(best[0] / best[i]))
        for i, (f, g, s) in enumerate(_ASKED)
    ]  # fmt: skip


def converted(source: Path, fmt: str, grain: str, scale: str) -> dict[str, object]:
    """Peak memory and processor time of one conversion."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        words = ["--format", fmt, "--granularity", grain, "--scale", scale, "--verify", "weights", "--json", "--quiet"]
        words += ["--layout", "compressed-tensors"] if grain == "nvfp4" else []
        command = [sys.executable, "-m", "lpconv", "convert", str(source), "--output", f"{folder}/output", *words]
        with tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(command, stdout=printed)
            _, status, usage = os.wait4(process.pid, 0)
            if os.waitstatus_to_exitcode(status):
                raise RuntimeError(f"`{' '.join(words)}` failed")
            printed.seek(0)
            report = json.load(printed)
    cpu = usage.ru_utime + usage.ru_stime
    return {
        "format": fmt,
        "granularity": grain,
        "scale": scale,
        "peak_mb": report["peak_rss_bytes"] / 1e6,
        "cpu_s": cpu,
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--convert", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [r for dtype in (torch.bfloat16, torch.float32) for r in rates(dtype, args.rounds)]
    for r in found:
        print(f"{r.dtype:9} {r.format:7} {r.granularity:10} {r.scale:6} {r.per_second / 1e6:5.0f} M/s  {r.share:.2f}")
    runs = [converted(args.convert, *asked) for asked in _ASKED] if args.convert else []
    for run in runs:
        print(*run.values())
    if args.output:
        document = {
            "torch": torch.__version__, "cores": len(os.sched_getaffinity(0)), "shape": _SHAPE, "rounds": args.rounds,
            "load_average": os.getloadavg()[0], "rates": [dataclasses.asdict(r) for r in found], "conversions": runs,
        }  # fmt: skip
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main()
