"""Capture the code that Inductor generates for a GPU, on a machine without one.

`torch.compile` compiles lpconv's functions on fake tensors of device "cuda". Inductor asks the driver only for the
properties of the device, which come from `TARGETS`. `captured` keeps the generated code instead of loading it.

A process pretends to have one GPU, chosen before anything is compiled. If its torch is a build for CPUs, it must be
started with the library of `fake_gpu.build_guard` preloaded.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('[^']*', '''(.*?)'''", re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"^ +(\w+)\.run\((.*), stream=", re.MULTILINE)
_SCALES_BYTES = 1 << 15  # upper bound for buffers of row magnitudes here; matrices are larger
_NAME = re.compile(r"\b(?:arg\d+_\d+|primals_\d+|tangents_\d+|buf\d+|\w+)\b")

_LIBRARIES: list[torch.library.Library] = []  # torch unloads a library with its last reference


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU to compile for."""

    name: str
    device: str
    backend: str
    arch: int | str
    warp: int
    processors: int
    shared: int


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(name="sm_80", device="A100", backend="cuda", arch=80, warp=32, processors=108, shared=166912),
        Target(name="sm_89", device="L40S", backend="cuda", arch=89, warp=32, processors=142, shared=101376),
        Target(name="sm_90", device="H100", backend="cuda", arch=90, warp=32, processors=132, shared=232448),
        Target(name="sm_100", device="B200", backend="cuda", arch=100, warp=32, processors=148, shared=232448),
        Target(name="sm_120", device="RTX 5090", backend="cuda", arch=120, warp=32, processors=170, shared=101376),
        Target(name="gfx942", device="MI300X", backend="hip", arch="gfx942", warp=64, processors=304, shared=65536),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One kernel launch; `pointers` has the size of each buffer and how often the kernel reads and writes it."""

    kernel: str
    source: str
    parameters: tuple[str, ...]
    pointers: tuple[tuple[str, int, int, int], ...]  # buffer, bytes, reads, writes

    @property
    def bytes_moved(self) -> int:
        return sum(size * (reads + writes) for _, size, reads, writes in self.pointers)

    @property
    def purpose(self) -> str:
        """Purpose in fp8 training: "cast", "scale", "decode", or "other" for kernels that bf16 training has too."""
        codes = {name for name in self.parameters if re.search(rf"'{name}': '\*fp8", self.source)}
        if any(f"tl.store({name} " in self.source for name in codes):
            return "cast"
        if any(f"tl.load({name} " in self.source for name in codes):
            return "decode"
        written = [size for _, size, _, writes in self.pointers if writes]
        is_scale = "amax" in self.kernel and "softmax" not in self.kernel and max(written, default=0) <= _SCALES_BYTES
        return "scale" if is_scale else "other"

    @property
    def num_clamps(self) -> int:
        """Number of NaN-propagating minima and maxima (clamps, looped reductions), single instructions since 2.14."""
        return len(re.findall(r"triton_helpers\.(?:min|max)imum\(", self.source))


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A compiled graph with its kernel launches; `reference` is the graph before lowering."""

    reference: torch.fx.GraphModule
    calls: tuple[Call, ...]
    outputs: frozenset[str]
    num_products: int

    @property
    def least_bytes(self) -> int:
        """Bytes of every input that is read and of every result, counted once, including those of matrix products."""
        kept = {b for c in self.calls for b, _, _, _ in c.pointers if not b.startswith("buf")} | self.outputs
        read = {b: size for c in self.calls for b, size, reads, _ in c.pointers if reads and not b.startswith("buf")}
        written = {b: size for c in self.calls for b, size, _, writes in c.pointers if writes and b in kept}
        return sum(read.values()) + sum(written.values())

    @property
    def bytes_moved(self) -> int:
        return sum(c.bytes_moved for c in self.calls)

    @property
    def reads(self) -> dict[str, int]:
        """Number of reads of each input matrix."""
        counts: Counter[str] = Counter()
        for buffer, size, reads, _ in (p for c in self.calls for p in c.pointers):
            if not buffer.startswith("buf") and size > 1 << 20:
                counts[buffer] += reads
        return dict(counts)

    @property
    def num_widened(self) -> int:
        """Conversions from 16 or 8 bits to fp32 per element before Inductor changes the graph."""
        return sum(_widens(node) for node in self.reference.graph.nodes)


def _widens(node: torch.fx.Node) -> bool:
    if "convert_element_type" not in str(node.target):
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    is_low = source.is_floating_point() and source.dtype.itemsize < 4
    return bool(source.dim() and is_low and result.dtype == torch.float32)


def pretend(target: Target) -> None:
    """Make this process compile for `target`. Not undone: one process serves one target."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = divmod(target.arch, 10) if isinstance(target.arch, int) else (9, 4)
    properties = SimpleNamespace(
        name=target.device, major=major, minor=minor, multi_processor_count=target.processors,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=target.warp,
        total_memory=80 << 30, shared_memory_per_block=49152, shared_memory_per_multiprocessor=target.shared + 1024,
        shared_memory_per_block_optin=target.shared, L2_cache_size=50 << 20, max_threads_per_block=1024,
        gcnArchName="" if target.backend == "cuda" else target.name, pci_bus_id=0,
    )  # fmt: skip
    stand_ins: dict[str, Any] = {
        "get_device_properties": lambda *device: properties,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda *device: (major, minor),
    }
    for name, answer in stand_ins.items():
        setattr(torch.cuda, name, answer)
    for interface in (CudaInterface, CudaInterface.Worker):
        interface.get_device_properties = staticmethod(lambda *device: properties)  # type: ignore[attr-defined]
        interface.current_device = staticmethod(lambda: 0)  # type: ignore[attr-defined]
    CudaInterface.get_compute_capability = staticmethod(lambda *device: 10 * major + minor)  # type: ignore[assignment]
    CudaInterface.is_available = staticmethod(lambda: True)  # type: ignore[method-assign]
    CudaInterface.is_bf16_supported = staticmethod(lambda *a, **k: True)  # type: ignore[method-assign]
    torch.version.cuda = "12.9"  # type: ignore[assignment]
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[method-assign,assignment]
    torch.autograd.set_multithreading_enabled(False)  # type: ignore[no-untyped-call]  # fake modes are per thread
    if not torch.cuda._is_compiled():  # type: ignore[no-untyped-call]
        # Without a CUDA kernel, a CPU build decomposes this op above autograd; CUDA builds do not.
        _LIBRARIES.append(torch.library.Library("aten", "IMPL"))
        _LIBRARIES[-1].impl("silu_backward", lambda *args: None, "CUDA")
    config.compile_threads = 1
    config.force_disable_caches = True
    config.joint_graph_constant_folding = False  # computes constants on the device
    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget(target.backend, target.arch, target.warp),
        get_current_device=lambda: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    driver.set_active(stand_in)


@contextmanager
def captured() -> Iterator[list[Graph]]:
    """Collect the graphs that `torch.compile` compiles inside; calls run the graph before lowering."""
    from torch._inductor.graph import GraphLowering

    graphs: list[Graph] = []

    def keep(lowered: Any) -> SimpleNamespace:
        code, _ = lowered.codegen()
        graphs.append(_graph(lowered, getattr(code, "value", code)))
        return SimpleNamespace(call=lambda arguments: lowered.orig_gm(*arguments), __file__="", runner=None)

    before, GraphLowering.compile_to_module = GraphLowering.compile_to_module, keep  # type: ignore[assignment,method-assign]
    torch._dynamo.reset()
    try:
        yield graphs
    finally:
        GraphLowering.compile_to_module = before  # type: ignore[method-assign]


def _graph(lowered: Any, code: str) -> Graph:
    sources = dict(_KERNEL.findall(code))
    body = code[code.index("def call(self, args):") :]
    calls = tuple(_call(lowered, name, sources[name], args) for name, args in _CALL.findall(body))
    returned = re.findall(r"^        return \((.*)\)$", body, re.MULTILINE)[-1]
    return Graph(
        reference=lowered.orig_gm,
        calls=calls,
        outputs=frozenset(_NAME.findall(returned)),
        num_products=len(re.findall(r"extern_kernels\.\w*mm|_scaled_mm\w*\.default\(", body)),
    )


def _call(lowered: Any, name: str, source: str, args: str) -> Call:
    definition = re.search(r"def \w+\((.*?)\):", source)
    assert definition is not None
    parameters = [p.split(":")[0].strip() for p in definition[1].split(",")]
    pointers = []
    for parameter, argument in zip(parameters, _split(args), strict=False):
        if "ptr" not in parameter:
            continue
        buffer = argument.removeprefix("reinterpret_tensor(").split(",")[0]
        numel = lowered.sizevars.optimization_hint(lowered.get_numel(buffer))
        pointers.append(
            (
                buffer,
                int(numel) * lowered.get_dtype(buffer).itemsize,
                len(re.findall(rf"tl\.load\({parameter}\b", source)),
                len(re.findall(rf"tl\.store\({parameter}\b", source)),
            )
        )
    return Call(kernel=name, source=source, parameters=tuple(parameters), pointers=tuple(pointers))


def _split(args: str) -> list[str]:
    """Split the arguments of a call at top-level commas."""
    parts, depth = [""], 0
    for character in args:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [p.strip() for p in parts]
