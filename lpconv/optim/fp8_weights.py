"""Linear layers with one byte per weight: e4m3fn numbers on unit scale, which the matmul reads without a cast.

A weight W becomes sigma · W_unit with sigma = 2^floor(log2 RMS(W)), and the parameter of the model is W_unit rounded to
e4m3fn. The dropped bits are stored in the optimizer (`Storage.FP8_BF16` and `FP8_FP8`), as for any Collage weight. So
weights need no cast before a matmul and no amax pass, and their gradient may stay bf16.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.formats.scale import pow2_floor
from lpconv.kernels.linear import LinearRecipe, fp8_recipe, linear
from lpconv.layers import head, linears
from lpconv.mcf.pairs import nearest_e4m3fn

# Inputs and gradients come from an ordinary model, so their scale is unknown.
RECIPE = fp8_recipe("max")

_ZERO_SCALE = 2.0**-6  # for all-zero weights; near 0.02, the usual standard deviation of an initialisation


class Fp8WeightLinear(nn.Module):
    """A linear layer with an e4m3fn weight (N, K) and a power-of-two scale: y = x (weight_scale · weight)ᵀ + bias.

    The product reads `weight` without a cast; inputs are cast to e4m3fn and gradients to e5m2 as `recipe` says. The
    gradient of `weight` is bf16 and taken with respect to the e4m3fn numbers, so it is weight_scale times the gradient
    of the value. The state dict has `weight` and `weight_scale`, the names that `lpconv convert --method unit --format
    e4m3fn` writes.
    """

    weight: nn.Parameter
    weight_scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, recipe: LinearRecipe = RECIPE) -> None:
        super().__init__()
        scale = _unit_scale(weight)
        hi = nearest_e4m3fn(weight.detach().float() / scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(hi)
        self.register_buffer("weight_scale", torch.tensor(scale, device=weight.device))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N), in the dtype of `x`."""
        if self.weight.is_leaf and self.weight.grad_dtype != torch.bfloat16:  # lost when a module is copied
            self.weight.grad_dtype = torch.bfloat16
        return linear(x, self.weight, self.bias, recipe=self.recipe, weight_scale=self.weight_scale)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, bias={self.bias is not None}"


def use_fp8_weights(
    model: nn.Module, *, exclude: Iterable[str] = (), recipe: LinearRecipe = RECIPE
) -> list[dict[str, Any]]:
    """Replace the linear layers of `model` by `Fp8WeightLinear`, in place; returns parameter groups for AdamW.

    Not replaced: the output head, weights that several modules share, GPT-2's Conv1D, whose weight is transposed, and
    modules whose name matches a pattern of `exclude`. The groups carry the `weight_scale` of their parameters; learning
    rate, eps and weight decay keep their meaning for the original weights. Convert the model to bf16 first: a later
    `.bfloat16()` would widen the weights again. Raises UsageError if a weight is not finite and if there is no layer to
    replace.
    """
    layers = list(_replaceable(model, tuple(exclude)))
    if not layers:
        raise UsageError(
            "the model has no Linear layer to replace",
            hint="output heads, tied weights and the modules in `exclude` are not replaced",
        )
    replacements = {name: Fp8WeightLinear(m.weight, m.bias, recipe=recipe) for name, m in layers}
    for name, old in layers:
        for kind, p in replacements[name].named_parameters():
            p.requires_grad_(old.get_parameter(kind).requires_grad)
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, replacements[name])
    by_scale: dict[float, list[nn.Parameter]] = {1.0: []}
    scales = {layer.weight: float(layer.weight_scale) for layer in replacements.values()}
    for p in model.parameters():
        by_scale.setdefault(scales.get(p, 1.0), []).append(p)
    return [{"params": params, "weight_scale": scale} for scale, params in by_scale.items() if params]


def _replaceable(model: nn.Module, exclude: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    output_head = head(model)
    owners = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for layer in linears(model):
        name = layer.name
        module: Any = layer.module
        excluded = module is output_head or any(fnmatchcase(name, pattern) for pattern in exclude)
        if layer.kind == "Linear" and layer.is_plain and name and not excluded and owners[module.weight] == 1:
            yield name, module


def _unit_scale(weight: Tensor) -> float:
    rms = float(weight.detach().double().square().mean().sqrt()) if weight.numel() else 0.0
    if not rms < float("inf"):
        raise UsageError("a weight has Inf or NaN", hint="go back to a checkpoint before the step that produced it")
    return float(pow2_floor(rms)) if rms > 0 else _ZERO_SCALE
