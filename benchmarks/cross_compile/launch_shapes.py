"""Is a transposed store of fp8 codes right for every launch shape? It was not, on GPUs, next to min.NaN (triton#11111).

    python -m benchmarks.cross_compile.launch_shapes --out FILE.json     # with torch 2.14 or later, and Triton

Inductor of torch 2.14 and later turns a clamp into min.NaN and max.NaN. Here a cast writes its codes and their
transpose in one kernel, is compiled for 64 launch shapes, and its PTX runs on the CPU (see `ptx`). A fault that enters
below PTX, in ptxas, cannot be seen so.
"""

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.cross_compile import machine_code
from benchmarks.cross_compile.__main__ import start_worker
from benchmarks.cross_compile.check import compare, inputs_of
from benchmarks.cross_compile.inductor import TARGETS, captured, pretend

_BLOCKS, _WARPS = (16, 32, 64, 128), (1, 2, 4, 8)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--worker", action="store_true", help="used by the script itself")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(list(_rows())))
        return
    with tempfile.TemporaryDirectory() as folder:
        said = start_worker(["-m", "benchmarks.cross_compile.launch_shapes", "--worker"], Path(folder))
    rows = json.loads(said.splitlines()[-1])
    common.save({"command": common.command(), **common.machine("triton"), "rows": rows}, options.out)
    print(json.dumps(rows))


def _rows() -> Any:
    os.environ.pop("LD_PRELOAD", None)
    target = TARGETS["sm_90"]
    pretend(target)
    from cuda_rehearsals import fake_gpu, on_gpu

    from benchmarks.cross_compile.paths import on_fake_gpu
    from lpconv.kernels.operands import OperandCast, encode_operand

    scale = torch.tensor(0.25)
    for name in ("e4m3fn", "e5m2"):
        cast = OperandCast(scale="static", format=name)

        def both(x: Tensor, state: Tensor, cast: OperandCast = cast) -> tuple[Tensor, Tensor]:
            codes = encode_operand(x, cast, state=state).codes
            return codes, codes.t().contiguous()

        with captured() as graphs, fake_gpu(), torch.no_grad():
            torch.compile(both, fullgraph=True)(on_gpu(128, 256), on_fake_gpu(scale))
        (graph,) = graphs
        row = {"format": name, "shapes": 0, "wrong": 0, "not_run": 0, "nan_clamps": 0}
        for shape in itertools.product(_BLOCKS, _BLOCKS, _WARPS):
            with _launched_as(*shape):
                codes = [machine_code.compile_kernel(c.kernel, c.source, target) for c in graph.calls]
                row["nan_clamps"] = max(row["nan_clamps"], *(c.count(r"(?:min|max)\.NaN") for c in codes))
                try:
                    found = compare(graph, inputs_of(graph), target)
                except (NotImplementedError, ValueError):  # an instruction that `ptx` does not know
                    row["not_run"] += 1
                    continue
            row["shapes"] += 1
            row["wrong"] += found.unequal > 0
        yield row


class _launched_as:
    """Inside, kernels are compiled for this launch shape instead of Inductor's first choice."""

    def __init__(self, x: int, y: int, warps: int) -> None:
        self.blocks, self.warps, self.load = {"XBLOCK": x, "YBLOCK": y}, warps, machine_code.load

    def __enter__(self) -> None:
        def load(*args: Any) -> Any:
            kernel = self.load(*args)
            kernel.configs[0].kwargs.update(self.blocks)
            kernel.configs[0].num_warps = self.warps
            return kernel

        machine_code.load = load

    def __exit__(self, *error: object) -> None:
        machine_code.load = self.load


if __name__ == "__main__":
    main()
