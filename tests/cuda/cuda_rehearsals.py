"""What a CPU can rehearse of the CUDA branches: fake tensors on device "cuda", which have all but data.

    LD_PRELOAD=GUARD.so python -m tests.cuda.cuda_rehearsals   # JSON: what each raised, and which lines it reached

Fake tensors obey the rules of CUDA's ops (for scaled products: layouts, multiples of 16, shapes of scales), so every
product, its backward pass and its compiled graph can be built as they would be on a GPU of compute capability 9.0. What
kernels compute, and how fast, needs one.

The script runs in a process of its own, where `guard.cpp` tells torch that CUDA is there before it looks.
"""

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

LPCONV = Path(__file__).parents[2] / "lpconv"
ODD = ((17, 33, 65), (1, 64, 16), (32, 64, 1))  # M, K, N: padding everywhere; rows and columns that are one
SHAPES = (*ODD, (16, 32, 48), (48, 1, 32), (1, 1, 1))
PRODUCT = "aten._scaled_mm_v2.default"


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors made inside have no data; one that an op cannot be faked for is an error."""
    with FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True):
        yield


@contextmanager
def products(expected: int) -> Iterator[None]:
    """Eagerly, exactly so many scaled products run inside."""
    module: Any = import_module("lpconv.kernels.matmul")
    run, calls = module._scaled_mm, []

    def counting(*args: Any) -> Tensor:
        calls.append(args)
        out: Tensor = run(*args)
        return out

    module._scaled_mm = counting
    try:
        yield
    finally:
        module._scaled_mm = run
    assert len(calls) == expected, f"{len(calls)} scaled products instead of {expected}"


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def codes(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return on_gpu(*shape, dtype=dtype)


def compiled(module: nn.Module) -> tuple[Callable[..., Any], list[int]]:
    """`module` compiled as one graph, and the scaled products of its forward and of its backward graph."""
    from torch._dynamo.backends.common import aot_autograd

    found: list[int] = []

    def keep(graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        found.append(sum(str(node.target) == PRODUCT for node in graph.graph.nodes))
        run: Callable[..., Any] = graph.forward
        return run

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(module, fullgraph=True, backend=backend), found


def product_of_codes() -> None:
    """Every granularity of scales, odd shapes, and results of each width."""
    from lpconv.kernels.matmul import matmul

    for m, k, n in SHAPES:
        row = (on_gpu(m, 1, dtype=torch.float32), on_gpu(n, 1, dtype=torch.float32).t())
        one = on_gpu(dtype=torch.float32)
        for scale_a, scale_b in ((None, None), (one, one), row, (row[0], one), (one, row[1])):
            for dtype, b in ((torch.bfloat16, codes(n, k).t()), (torch.float32, codes(k, n))):
                with products(1):
                    y = matmul(codes(m, k), b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
                assert (y.shape, y.dtype, y.device.type) == ((m, n), dtype, "cuda")


def product_without_tensor_cores() -> None:
    """What fp8 tensor cores do not support is decoded: two e5m2 matrices, fnuz codes, older GPUs, empty tensors."""
    from lpconv.kernels.matmul import matmul

    for dtype in (torch.float8_e5m2, torch.float8_e4m3fnuz):
        with products(0):
            assert matmul(codes(16, 32, dtype=dtype), codes(32, 48, dtype=dtype)).shape == (16, 48)
    with products(0):
        assert matmul(codes(0, 32), codes(32, 48)).shape == (0, 48)
        assert matmul(on_gpu(4, 8), on_gpu(8, 4), out_dtype=torch.float32).dtype == torch.float32
    with capability(8, 0), products(0):
        assert matmul(codes(16, 32), codes(32, 48)).shape == (16, 48)


@contextmanager
def capability(*version: int) -> Iterator[None]:
    before, torch.cuda.get_device_capability = torch.cuda.get_device_capability, lambda *device: version  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.get_device_capability = before


def functional_linear() -> None:
    """`kernels.linear`: three products with fp8 codes, with and without scales; none in fp16."""
    from lpconv.kernels.linear import FP16_LINEAR, LinearRecipe, fp8_recipe, linear

    for recipe, expected in ((LinearRecipe(), 3), (fp8_recipe("max"), 3), (FP16_LINEAR, 0)):
        for m, k, n in ODD:
            x, w = on_gpu(m, k).requires_grad_(), on_gpu(n, k).requires_grad_()
            with products(expected):
                linear(x, w, recipe=recipe).sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            assert w.grad is not None
            assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)


def fp8_layer(recipe: str, n: int, k: int) -> nn.Module:
    from lpconv.kernels.linear import FP8_RECIPES, use_recipe

    layer = nn.Linear(k, n)
    layer.weight, layer.bias = nn.Parameter(on_gpu(n, k)), nn.Parameter(on_gpu(n))
    use_recipe(layer, FP8_RECIPES[recipe])
    if recipe == "static":  # `calibrate` reads the weight: its scales are put in here
        for name in ("input_state", "weight_state", "gradient_state"):
            layer.register_buffer(name, torch.ones((), device="cuda"))
    return layer


def fp8_linear() -> None:
    """Forward and backward of every recipe: three scaled products, or none with scales per block."""
    from lpconv.kernels.linear import FP8_RECIPES

    for recipe in FP8_RECIPES:
        for m, k, n in ODD:
            layer, x = fp8_layer(recipe, n, k), on_gpu(1, m, k).requires_grad_()
            with products(3 if recipe != "mx" else sum(summed <= 32 for summed in (m, k, n))):
                layer(x).sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


def frozen_fp8_linear() -> None:
    """Inference from codes."""
    for recipe in ("tensor", "row", "mx"):
        layer: Any = fp8_layer(recipe, 33, 65)
        layer.freeze()
        with torch.no_grad(), products(0 if recipe == "mx" else 1):  # 65 columns are three blocks
            assert layer(on_gpu(7, 65)).shape == (7, 33)


def fp8_linear_compiled() -> None:
    """One graph each way, at odd shapes; products stay in fp8, except with scales per block."""
    layers = [fp8_layer("tensor", 65, 33), fp8_layer("row", 1, 65), fp8_layer("mx", 40, 1)]
    run, found = compiled(nn.Sequential(*layers))
    run(on_gpu(49, 33).requires_grad_()).sum().backward()
    assert found == [3, 4], found  # mx: the one input is a block, 40 outputs and 49 rows are two each


def codecs() -> None:
    """Casts and decoding; checks of values are skipped, because a GPU would have to wait for them."""
    from lpconv.kernels.decode import decode
    from lpconv.kernels.matmul import HalfProducts
    from lpconv.kernels.quantise import encode, fake_quantise

    for name in ("e4m3fn", "e5m2"):
        found = encode(on_gpu(5, 7), name)
        assert (found.shape, found.itemsize, found.device.type) == ((5, 7), 1, "cuda")
        assert decode(found, torch.float32).device.type == "cuda"
        assert fake_quantise(on_gpu(5, 7), name).dtype == torch.bfloat16
        assert fake_quantise(on_gpu(5, 7), name, rounding="stochastic").dtype == torch.bfloat16
    with HalfProducts():
        assert torch.mm(on_gpu(4, 4, dtype=torch.float16), on_gpu(4, 4, dtype=torch.float16)).dtype == torch.float16


def moved_to_gpu(model: nn.Module) -> nn.Module:
    """A scaled model from the CPU with every tensor replaced by a fake one on the GPU."""
    from dataclasses import replace

    from lpconv.scaled import ScaledTensor
    from lpconv.scaled.model import scaling_of

    scaling = scaling_of(model)
    assert scaling is not None
    for module in model.modules():
        for name, p in module._parameters.items():
            if isinstance(p, ScaledTensor):
                data = on_gpu(*p.shape, dtype=p.dtype)
                module._parameters[name] = nn.Parameter(ScaledTensor(data, p.scale, p.role, p.numerics))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else on_gpu(*buffer.shape, dtype=buffer.dtype)
    unit = ScaledTensor(on_gpu(dtype=torch.float32), 1.0, scaling.unit.role, scaling.numerics)
    model.lpconv_scaling = replace(scaling, unit=unit)  # type: ignore[assignment]  # not a module or tensor
    return model


class Model(nn.Module):
    """Of tokens: an embedding, a norm, a gated MLP, a head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 33), nn.LayerNorm(33)
        self.gate, self.up, self.down = nn.Linear(33, 65), nn.Linear(33, 65), nn.Linear(65, 33)
        self.head = nn.Linear(33, 64)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        inner = self.norm(hidden)
        hidden = hidden + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))
        return nn.functional.cross_entropy(self.head(hidden).float(), ids)


def _tokens() -> Tensor:
    return torch.zeros(17, dtype=torch.long, device="cuda")


def scaled_training() -> None:
    """Steps without and with operand scales: three fp8 products for each linear layer except the head; AdamW."""
    from lpconv.scaled import AdamW, scaled

    for kind in ("static", "row"):
        model = scaled(Model(), method="scalify", compute="fp8", operand_scale=kind, strict=True)
        with fake_gpu():
            with products(9):
                moved_to_gpu(model)(_tokens()).backward()
            AdamW(model.parameters(), lr=1e-3).step()


def scaled_training_compiled() -> None:
    """The products of a compiled scaled model are fp8 too."""
    from lpconv.scaled import scaled

    for kind in ("tensor", "row"):
        model = scaled(Model(), compute="fp8", operand_scale=kind, save_codes=False, strict=True)
        with fake_gpu():
            run, found = compiled(moved_to_gpu(model))
            run(_tokens()).backward()
            assert found == [3, 6], found


def optimizer_steps() -> None:
    """The eager step of every variant; the compiled step needs Triton."""
    from lpconv.optim.kernel import STEPS, _check_inputs, get_kernel
    from lpconv.optim.storage import VARIANTS

    for variant in VARIANTS.values():
        storages = (variant.weight, *variant.moments)
        name = variant.rule or "adamw"
        parts, gradient, coefficients, random = _check_inputs(STEPS[name], storages, torch.device("cuda"))
        kernel = get_kernel(name, storages, "cuda", compiled=False)
        for mode in ("eager", "cast"):  # by blocks, and in rows as a compiled step takes them
            dataclasses.replace(kernel, mode=mode).run(parts, gradient, coefficients, random)


def attention() -> None:
    """The three attention kernels that only CUDA has, with scaled tensors, forward and backward."""
    from lpconv.scaled import scaled_tensor
    from lpconv.scaled.pair import Numerics

    aten, strict = torch.ops.aten, Numerics(strict=True)
    for name in ("flash", "cudnn", "efficient"):
        q, k, v = (scaled_tensor(on_gpu(2, 3, 17, 16), 2.0, numerics=strict).requires_grad_() for _ in range(3))
        op = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        out = op(q, k, v) if name == "flash" else op(q, k, v, None, True)
        out[0].sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


def drivers_answers() -> None:
    """Calls to the driver, with stand-ins for its answers."""
    from lpconv.bench import models, worker
    from lpconv.bench.options import Case
    from lpconv.bench.recipes import is_emulated
    from lpconv.cli.progress import _memory_bytes
    from lpconv.doctor import _gpus
    from lpconv.train import memory, processes

    properties = SimpleNamespace(major=9, minor=0, name="GPU", multi_processor_count=132, total_memory=2**36)
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 2, "get_device_name": lambda index: f"GPU {index}",
        "mem_get_info": lambda: (2**34, 2**36), "memory_allocated": lambda: 2**20, "synchronize": lambda: None,
        "set_device": lambda device: None, "get_arch_list": lambda: ["sm_90"],
        "get_device_properties": lambda index: properties,
    }  # fmt: skip
    with patch.multiple(torch.cuda, **answers):
        gpu, other = _gpus()
        assert (gpu.label, other.index, gpu.problem) == ("cuda:0", 1, None)
        found = worker.Worker().look("cuda:1", 1)
        assert found == {"device": "cuda:1", "index": 1, "name": "GPU 1"}
        worker._use("cuda:1", None, 2)
        assert worker._device_name("cuda:1") == "GPU cuda:1"
        assert worker._seconds(lambda: None, "cuda") >= 0
        assert models.free_device_bytes("cuda:0") == memory.available_bytes(None) == 2**34
        assert _memory_bytes() == 2**20
        with patch.dict(os.environ, WORLD_SIZE="2"):
            assert processes.backend() is None
        fields = {f.name: None for f in dataclasses.fields(Case)} | {"device": "cuda:0"}
        for format, method, emulated in (("fp8", "static", False), ("fp8", "mx", True), ("fp16", "plain", False)):
            assert is_emulated(Case(**fields | {"format": format, "method": method})) == emulated
        with capability(8, 6):
            assert is_emulated(Case(**fields | {"format": "fp8", "method": "static"}))


REHEARSALS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        product_of_codes, product_without_tensor_cores, functional_linear, fp8_linear, frozen_fp8_linear,
        fp8_linear_compiled, codecs, scaled_training, scaled_training_compiled, optimizer_steps, attention,
        drivers_answers,
    )
}  # fmt: skip
OWN_MODELS = (
    "scaled_training",
    "scaled_training_compiled",
    "drivers_answers",
)  # built on the CPU before they are faked


class Reached:
    """The lines of lpconv that ran in each rehearsal, but for those inside compiled graphs, which run no Python."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, str, int]] = set()
        self.rehearsal = ""

    def __call__(self, frame: Any, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(str(LPCONV)) else None

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        self.lines.add((self.rehearsal, frame.f_code.co_filename, frame.f_lineno))
        return self._line


def rehearse(name: str) -> str | None:
    """What a rehearsal raised, None where it passed."""
    try:
        if name in OWN_MODELS:
            REHEARSALS[name]()
        else:
            with fake_gpu():
                REHEARSALS[name]()
    except Exception:
        return "\n".join(traceback.format_exc().splitlines()[-60:])
    return None


def main() -> None:
    torch.autograd.set_multithreading_enabled(False)  # the backward pass in this thread, whose lines are seen
    torch.cuda.get_device_capability = lambda *device: (9, 0)  # type: ignore[assignment]
    if not torch.cuda._is_compiled():  # type: ignore[no-untyped-call]
        # Without a kernel for it a build for CPUs takes this op apart above autograd, which no build for CUDA does.
        kept = torch.library.Library("aten", "IMPL")
        kept.impl("silu_backward", lambda *args: None, "CUDA")
    for name in ("lpconv.optim.kernel", "lpconv.bench.worker"):
        import_module(name)  # untraced: tracing imports would take most of the time
    reached = Reached()
    errors: dict[str, str | None] = {}
    for name in REHEARSALS:
        reached.rehearsal = name
        sys.settrace(None if name.endswith("compiled") else reached)
        errors[name] = rehearse(name)
        sys.settrace(None)
    lines = sorted((str(Path(file).relative_to(LPCONV)), line, name) for name, file, line in reached.lines)
    print(json.dumps({"errors": errors, "reached": lines}))


if __name__ == "__main__":
    main()
