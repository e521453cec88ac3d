"""What finer scales cost in time and memory beside one scale for a tensor.

    python benchmarks/rates.py [--rounds 9] [--convert CHECKPOINT] [--conversions 3] [--output FILE]

Rates are weights per second of processor time on one core: the scales and the codes of a matrix in memory, without
reading, hashing or writing. Forms take turns within a round; the best round counts, so that other work on the machine
disturbs least. `--convert` also converts a checkpoint into each form, in a process of its own with its check of the
weights, for peak memory and processor time; these take turns, too. A form is compared with one scale, a conversion with
that of one scale in the same layout.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lpconv.formats.grains import grain_of
from lpconv.formats.spec import FORMATS
from lpconv.forms.blocks import Workspace, finite_absmax
from lpconv.forms.compressed import CompressedTiles
from lpconv.forms.facts import Settings
from lpconv.forms.form import Form
from lpconv.forms.ranges import block_ranges

T = TypeVar("T")
_SHAPE = (2048, 4096)
_ASKED = (
    ("e4m3fn", "tensor", "pow2"), ("e4m3fn", "row", "pow2"), ("e4m3fn", "row", "exact"), ("e4m3fn", "128x128", "pow2"),
    ("e4m3fn", "mx", "pow2"), ("e2m1", "mx", "pow2"), ("e2m1", "nvfp4", "pow2"), ("int8", "group:128", "exact"),
    ("int4", "group:128", "exact"), ("int4", "group:32", "pow2"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rate:
    """`per_second` weights of one core, of the best round; `share` of that with one scale."""

    dtype: str
    format: str
    granularity: str
    scale: str
    per_second: float
    share: float


def seconds(form: Form, x: Tensor, work: Workspace) -> float:
    """Processor time of the scales and all codes of a matrix, 1-D."""
    blocks = [(x[start:stop], start) for start, stop in block_ranges(x.numel(), form.cols)]

    def over(job: Callable[[Tensor, int, Workspace], T], /) -> list[T]:
        return [job(block, start, work) for block, start in blocks]

    started = time.process_time()
    if form.late:
        found = form.begin(max(over(lambda block, _, work: finite_absmax(block, work))) if form.shares else 0.0)
        form.conclude(over(lambda block, start, work: form.look_and_encode(block, start, found, work)[0]), over)
    else:
        found = form.measure(over)
        over(lambda block, start, work: form.encode(block, start, found, work))
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


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A whole conversion: the largest peak of memory and the least processor time of all rounds; `share` of the rate of
    one scale in the same layout."""

    format: str
    granularity: str
    scale: str
    layout: str
    peak_mb: float
    cpu_s: float
    share: float


def conversions(source: Path, rounds: int) -> list[Conversion]:
    layouts = {"nvfp4": "compressed-tensors"}
    asked = [(*_ASKED[0], "compressed-tensors"), *((*a, layouts.get(a[1], "lpconv")) for a in _ASKED)]
    found = [(a, *converted(source, *a)) for _, a in itertools.product(range(rounds), asked)]
    peaks = {a: max(peak for b, peak, _ in found if a == b) for a in asked}
    times = {a: min(cpu for b, _, cpu in found if a == b) for a in asked}
    return [
        Conversion(
            format=f, granularity=g, scale=s, layout=layout, peak_mb=peaks[f, g, s, layout],
            cpu_s=times[f, g, s, layout], share=times[*_ASKED[0], layout] / times[f, g, s, layout],
        )
        for f, g, s, layout in asked
    ]  # fmt: skip


def converted(source: Path, fmt: str, grain: str, scale: str, layout: str) -> tuple[float, float]:
    """Peak memory in MB and processor time in seconds of one conversion."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        words = ["--format", fmt, "--granularity", grain, "--scale", scale, "--layout", layout, "--verify", "weights"]
        words += ["--json", "--quiet"]
        command = [sys.executable, "-m", "lpconv", "convert", str(source), "--output", f"{folder}/output", *words]
        with tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(command, stdout=printed)
            _, status, usage = os.wait4(process.pid, 0)
            if os.waitstatus_to_exitcode(status):
                raise RuntimeError(f"`{' '.join(words)}` failed")
            printed.seek(0)
            report = json.load(printed)
    return report["peak_rss_bytes"] / 1e6, usage.ru_utime + usage.ru_stime


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--convert", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--conversions", type=int, default=3, metavar="ROUNDS")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [r for dtype in (torch.bfloat16, torch.float32) for r in rates(dtype, args.rounds)]
    for r in found:
        print(f"{r.dtype:9} {r.format:7} {r.granularity:10} {r.scale:6} {r.per_second / 1e6:5.0f} M/s  {r.share:.2f}")
    runs = conversions(args.convert, args.conversions) if args.convert else []
    for c in runs:
        words = f"{c.format:7} {c.granularity:10} {c.scale:6} {c.layout:18}"
        print(f"{words} {c.peak_mb:5.0f} MB {c.cpu_s:6.2f} s  {c.share:.2f}")
    if args.output:
        document = {
            "torch": torch.__version__, "cores": len(os.sched_getaffinity(0)), "shape": _SHAPE, "rounds": args.rounds,
            "load_average": os.getloadavg()[0], "rates": [dataclasses.asdict(r) for r in found],
            "conversion_rounds": args.conversions, "conversions": [dataclasses.asdict(c) for c in runs],
        }  # fmt: skip
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main()
