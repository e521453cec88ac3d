"""Compile what lpconv runs on a GPU to machine code, on a machine without one, and see what it costs and rounds.

    pip install triton     # 1 GB, for this benchmark alone
    python -m benchmarks.cross_compile --out benchmarks/cross_compile/results/cross_compile.json    # all targets
    python -m benchmarks.cross_compile --targets sm_90 --only "cast row"

For each path (optimizer steps, casts, decoding, fp8 layers, training steps of small models) and target: kernels,
registers, bytes that do not fit registers, bytes that the code reads and writes beside the least that it must. For
optimizer steps, casts and decoding the PTX for sm_90 also runs on the CPU and is compared with eager mode bit for bit.

What this cannot show: whether a GPU accepts the code, how fast it is, and the products, which cuBLASLt computes.
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

_ROOT = Path(__file__).parents[2]
_COMPARED = "sm_90"  # the target whose PTX also runs on the CPU
_CHECKED = ("step", "round", "cast", "decode")  # paths without products


def main() -> int:
    """Write the results of all targets, as many at a time as there are cores; rows of an existing file are replaced."""
    parser = common.parser(__doc__)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--only", default="", help="only paths whose names match this regular expression")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker, options.only)
        return 0
    start = time.perf_counter()
    kept = common.load(options.out)["rows"] if options.out and options.out.exists() else []
    rows = {(r["target"], r["path"]): r for r in kept}
    targets = sorted(options.targets, key=lambda t: t != _COMPARED)  # the longest first
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        folders = [Path(tempfile.mkdtemp(dir=folder)) for _ in targets]
        for found in pool.map(run_worker, targets, [options.only] * len(targets), folders):
            rows |= {(r["target"], r["path"]): r for r in found}
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
    """The rows of one target."""
    said = start_worker(["-m", "benchmarks.cross_compile", "--worker", target, "--only", only], folder)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def start_worker(command: list[str], folder: Path) -> str:
    """What a Python process prints that can compile for a GPU.

    A torch for CPUs gets a device "cuda" from a library that is built in `folder`.
    """
    sys.path.append(str(_ROOT / "tests" / "cuda"))
    from cuda_page import build_guard

    library = folder / "guard.so"
    if not torch.version.cuda and not library.exists():
        build_guard(library)
    paths = [str(_ROOT), str(_ROOT / "tests" / "cuda"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True,
        env={
            **os.environ, "LPCONV_COMPILE": "never", "PYTHONPATH": os.pathsep.join(paths),
            **({"LD_PRELOAD": str(library)} if library.exists() else {}),
        },
    )  # fmt: skip
    return done.stdout


def _work(target_name: str, only: str) -> None:
    """Print a row as JSON for each path."""
    os.environ.pop("LD_PRELOAD", None)  # compilers start here
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
    from benchmarks.cross_compile.check import compare, inputs_of
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
        row["instructions"] = compiled[0][1].instructions_per_element
    if target.name == _COMPARED and path.name.split()[0] in _CHECKED:
        found = [compare(g, inputs_of(g), target) for g in graphs]
        row["unequal"] = sum(d.unequal for d in found)
        row["compared"] = sum(d.elements for d in found)
    return row


if __name__ == "__main__":
    sys.exit(main())
