"""Fake tensors on device "cuda" and modules made of them, on a machine without a GPU."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import common
from lpconv.kernels import FP8_RECIPES, use_recipe
from lpconv.scaled import ScaledTensor
from lpconv.scaled.model import scaling_of

_GUARD = common.ROOT / "tests" / "cuda" / "guard.cpp"


def build_guard(library: Path) -> Path:
    """Compile the library that lets a torch for CPUs trace over CUDA tensors; it must be preloaded."""
    headers, libraries = Path(torch.__file__).parent / "include", Path(torch.__file__).parent / "lib"
    paths = [f"-I{headers}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", *paths]
    subprocess.run([*command, str(_GUARD), "-o", str(library), "-lc10", "-ltorch_cpu"], check=True)
    return library


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors created inside have no data; an op without a fake implementation is an error."""
    with FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True):
        yield


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An empty CUDA tensor."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def like(x: Tensor) -> Tensor:
    """A CUDA tensor with the shape and dtype of `x`. The length of rows is a constant, as in optimizer steps."""
    fake = on_gpu(*x.shape, dtype=x.dtype)
    if x.dim() == 2:
        torch._dynamo.mark_static(fake, 1)
    return fake


def linear(recipe: str | None, num_out: int, num_in: int) -> nn.Module:
    """A linear layer with an fp8 recipe, or in bf16 if the recipe is None."""
    layer = nn.Linear(1, 1)
    layer.weight, layer.bias = nn.Parameter(on_gpu(num_out, num_in)), nn.Parameter(on_gpu(num_out))
    if recipe is not None:
        use_recipe(layer, FP8_RECIPES[recipe])
    if recipe == "static":  # calibration reads the weight, which has no data here
        for name in ("input_state", "weight_state", "gradient_state"):
            layer.register_buffer(name, torch.ones((), device="cuda"))
    return layer


def moved(model: nn.Module) -> nn.Module:
    """The model, plain or scaled, with every tensor replaced by a fake one on the GPU."""
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = None if p is None else nn.Parameter(_moved(p))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else on_gpu(*buffer.shape, dtype=buffer.dtype)
    if scaling := scaling_of(model):
        unit = ScaledTensor(on_gpu(dtype=torch.float32), 1.0, scaling.unit.role, scaling.numerics)
        model.lpconv_scaling = replace(scaling, unit=unit)  # type: ignore[assignment]  # not a module or tensor
    return model


def _moved(p: Tensor) -> Tensor:
    data = on_gpu(*p.shape, dtype=p.dtype)
    return ScaledTensor(data, p.scale, p.role, p.numerics) if isinstance(p, ScaledTensor) else data
