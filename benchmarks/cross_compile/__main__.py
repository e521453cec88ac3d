"""Compile everything that lpconv runs on a GPU to machine code, on a machine without a GPU.

    pip install triton     # 1 GB, for this benchmark alone
    python -m benchmarks.cross_compile --out benchmarks/cross_compile/results/cross_compile.json    # all targets
    python -m benchmarks.cross_compile --targets sm_90 --only "cast row"

For each path (optimizer steps, casts, decoding, fp8 layers, training steps of small models) and target, counts kernels,
registers, spilled bytes, and the bytes that the code moves next to the least possible. For optimizer steps on sm_90 it
also counts the roundings that the compiler dropped (eager mode rounds a number to 16 bits and reads it back, compiled
code keeps the fp32 value), and the products that it fused with a sum.

Not shown: whether a GPU accepts the code, how fast it is, and the matrix products, which cuBLASLt computes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.cross_compile.inductor import TARGETS

_COUNTED = "sm_90"  # the target whose roundings are counted; the others get the same Triton code


def main() -> int:
    """Compile for all targets in parallel and write the rows, replacing those of an existing file."""
    parser = common.parser(__doc__)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--only", default="", help="only paths whose names match this regular expression")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker, options.only)
        return 0
    start = time.perf_counter()
    known = common.load(options.out)["rows"] if options.out and options.out.exists() else []
    rows = {(r["target"], r["path"]): r for r in known}
    targets = sorted(options.targets, key=lambda t: t != _COUNTED)  # the slowest first
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        folders = [Path(tempfile.mkdtemp(dir=folder)) for _ in targets]
        for compiled in pool.map(run_worker, targets, [options.only] * len(targets), folders):
            rows |= {(r["target"], r["path"]): r for r in compiled}
    seconds = round(time.perf_counter() - start)
    document = {
        "command": common.command().replace(".__main__", ""),
        **common.machine("triton"),
        "seconds": seconds,
        "rows": [row for target in TARGETS for row in rows.values() if row["target"] == target],
    }
    common.save(document, options.out)
    return 0


def run_worker(target: str, only: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of one target, from a process in which torch finds a device "cuda"."""
    from benchmarks.cross_compile.fake_gpu import build_guard

    preloaded = {} if torch.version.cuda else {"LD_PRELOAD": str(build_guard(folder / "guard.so"))}
    command = ["-m", "benchmarks.cross_compile", "--worker", target, "--only", only]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=common.ROOT, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "LPCONV_COMPILE": "never", **preloaded},
    )  # fmt: skip
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def _work(target_name: str, only: str) -> None:
    """Print one JSON row per path."""
    os.environ.pop("LD_PRELOAD", None)  # not for the compilers that start from here
    from benchmarks.cross_compile.inductor import pretend

    target = TARGETS[target_name]
    pretend(target)
    from benchmarks.cross_compile.paths import paths

    for path in paths():
        if re.search(only, path.name):
            row = _row(path, target)
            print(json.dumps(row), flush=True)
            print(f"{target.name} {path.name}: {row['kernels']} kernels", file=sys.stderr)


def _row(path: Any, target: Any) -> dict[str, Any]:
    from benchmarks.cross_compile.machine_code import NotSupported, compile_kernel

    graphs = path.graphs()
    row: dict[str, Any] = {
        "target": target.name,
        "path": path.name,
        "kernels": [len(g.calls) for g in graphs],
        "products": [g.num_products for g in graphs],
        "bytes_moved": sum(g.bytes_moved for g in graphs),
        "purposes": Counter(c.purpose for g in graphs for c in g.calls),
        "clamps": sum(c.num_clamps for g in graphs for c in g.calls if c.purpose == "cast"),
    }
    if path.name.startswith("linear"):
        row["reads"] = [g.reads for g in graphs]
    if path.elements:
        row |= {"elements": path.elements, "least_bytes": sum(g.least_bytes for g in graphs)}
    try:
        compiled = [(c.kernel, compile_kernel(c.kernel, c.source, target)) for g in graphs for c in g.calls]
    except NotSupported as error:
        return row | {"not_supported": str(error)}
    row["registers"] = max((code.registers for _, code in compiled), default=0)
    row["spilled"] = sum(code.spilled for _, code in compiled)
    if row["spilled"]:
        row["spills_in"] = [name for name, code in compiled if code.spilled]
    if path.name.startswith("step"):
        ((_, code),) = compiled
        row["instructions"] = code.instructions_per_element
        if target.name == _COUNTED and not path.name.endswith("by bits"):  # which round by integer operations
            row["widened"], row["wanted_widened"] = code.widened_per_element, graphs[0].num_widened
            row["fused"] = code.num_fused
    return row


if __name__ == "__main__":
    sys.exit(main())
