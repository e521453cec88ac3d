"""Runs a compiled graph's machine code on a CPU and compares it with the graph that it was made from, bit for bit."""

import contextlib
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cross_compile import ptx
from benchmarks.cross_compile.inductor import Call, Graph, Target
from benchmarks.cross_compile.machine_code import MachineCode, compile_kernel


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a graph's results differ: elements with other bits, of all; `largest` is relative, of finite elements."""

    unequal: int
    elements: int
    largest: float


def compare(
    graph: Graph, inputs: list[Tensor | int], target: Target, *, fuses_products: bool | None = None
) -> Difference:
    """Compare results and changed inputs of the machine code with the reference's, on CPU tensors.

    Raises NotImplementedError for instructions that `ptx` does not know, or a graph with products.
    """
    got, expected = (_copies(inputs) for _ in range(2))
    compiled = {
        c.kernel: compile_kernel(c.kernel, c.source, target, fuses_products=fuses_products) for c in graph.calls
    }
    results = _run(graph, got, compiled)
    with on_cpu(graph):
        references = graph.reference(*expected)
    pairs = [*zip(results, references, strict=True), *zip(got, expected, strict=True)]
    unequal, elements, largest = 0, 0, 0.0
    for a, b in pairs:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = _same(a, b)
            unequal, elements = unequal + int((~same).sum()), elements + a.numel()
            wide_a, wide_b = a.double(), b.double()
            apart = ((wide_a - wide_b).abs() / wide_b.abs().clamp(min=2.0**-126))[~same]
            largest = max(largest, *apart.nan_to_num(math.inf, math.inf).tolist(), 0.0)
    return Difference(unequal=unequal, elements=elements, largest=largest)


def inputs_of(graph: Graph) -> list[Tensor | int]:
    """The real values of a graph's arguments, or random ones of many magnitudes; scalars are positive."""
    generator, inputs = torch.Generator().manual_seed(1), []
    for argument in graph.arguments:
        if not isinstance(argument, Tensor):
            inputs.append(int(argument))
        elif hasattr(argument, "real_value"):
            inputs.append(argument.real_value)
        else:
            exponents = torch.randint(-8, 8, argument.shape, generator=generator)
            x = torch.randn(argument.shape, generator=generator).ldexp(exponents)
            x = x.clamp(-400, 400) if x.dim() else x.abs()  # codes of fp8 are finite
            inputs.append(x.to(argument.dtype))
    return inputs


def _copies(inputs: list[Tensor | int]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Which elements have equal bits, or are both NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    equal = a.contiguous().view(integers) == b.contiguous().view(integers)
    return equal | (a.double().isnan() & b.double().isnan())


@contextlib.contextmanager
def on_cpu(graph: Graph) -> Any:
    """The reference runs on CPU tensors inside."""
    before = [(n, n.target, n.kwargs) for n in graph.reference.graph.nodes]
    for node, target, kwargs in before:
        if str(kwargs.get("device", "")).startswith("cuda"):
            node.kwargs = {**kwargs, "device": torch.device("cpu")}
        if target is torch.ops.aten.sqrt.default:
            node.target = _sqrt
    graph.reference.recompile()
    try:
        yield
    finally:
        for node, node.target, node.kwargs in before:  # noqa: B007
            pass
        graph.reference.recompile()


def _sqrt(x: Tensor) -> Tensor:
    """Rounded correctly; torch's square root for CPUs is not, for one float32 in five."""
    return x.double().sqrt().to(x.dtype)


def _run(graph: Graph, inputs: list[Any], compiled: dict[str, MachineCode]) -> tuple[Any, ...]:
    """Run Inductor's own host code, with kernels that are interpreted."""
    kernels = {c.kernel: SimpleNamespace(run=_launcher(c, compiled[c.kernel])) for c in graph.calls}
    names: dict[str, Any] = {
        **dict.fromkeys(re.findall(r"\bassert_\w+(?=\()", graph.code), lambda *a, **k: None),
        "copy_if_misaligned": lambda x: x,
        "get_raw_stream": lambda index: 0, "reinterpret_tensor": torch.as_strided, "math": math,
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "torch": _Torch(), **kernels,
    }  # fmt: skip
    exec(graph.code[graph.code.index("class Runner") :].split("\ndef benchmark_compiled_module")[0], names)
    return tuple(names["call"](list(inputs)))


class _Torch:
    """torch, without a device to guard."""

    cuda = SimpleNamespace(_DeviceGuard=lambda index: contextlib.nullcontext(), set_device=lambda index: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _launcher(call: Call, code: MachineCode) -> Any:
    parameters = call.parameters

    def run(*arguments: Any, stream: int) -> None:
        given = dict(zip(parameters, arguments, strict=False))
        sizes = [-(-int(given.get(f"{axis}numel", 1)) // code.launch.get(f"{axis.upper()}BLOCK", 1)) for axis in "xyz"]
        passed = [given[name] for name, _ in code.parameters]
        grid = (sizes[0], sizes[1], sizes[2])
        ptx.run(code.assembly, passed, grid=grid, threads=32 * code.launch["num_warps"])

    return run
