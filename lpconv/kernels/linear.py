"""A linear layer whose three products (output, input gradient, weight gradient) run in low precision.

    y_MN = x_MK @ w_NKᵀ        dx_MK = g_MN @ w_NK        dw_NK = g_MNᵀ @ x_MK

Each operand is rounded once and saved as codes for the backward pass, so fp8 halves the saved bytes of a bfloat16
layer.
"""

import functools
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.formats.cast import Rounding
from lpconv.formats.codes import code_dtype
from lpconv.formats.scale import tensor_scale
from lpconv.formats.spec import get_format
from lpconv.kernels.matmul import matmul
from lpconv.kernels.quantise import fake_quantise
from lpconv.kernels.scaled_cast import scaled_codes
from lpconv.layers import linears


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """The formats of a linear layer's operands, and their scaling.

    "unit" casts without a scale, for tensors at unit scale; "amax" divides each by a power of two that brings its
    largest element into the format's top binade. float16 and bfloat16 overflow to Inf, which a loss scaler can detect;
    fp8 saturates, unless `overflow` is "inf", which only e5m2 supports. Values that were not finite before a cast are
    not finite after it. With "stochastic" `rounding`, inputs and gradients are rounded up or down at random with
    torch's generator, but weights never; without gradients nothing is random, so that evaluation needs no seed.
    """

    input: str = "e4m3fn"
    weight: str = "e4m3fn"
    gradient: str = "e5m2"
    scaling: Literal["unit", "amax"] = "unit"
    overflow: Literal["saturate", "inf"] = "saturate"
    rounding: Rounding = "nearest"


FP8_LINEAR = LinearRecipe()
FP16_LINEAR = LinearRecipe(input="fp16", weight="fp16", gradient="fp16")
# Mixed precision with 8-bit floats (Mellempudi et al. 2019, arXiv 1905.12334): e5m2 everywhere, and a loss scale. The
# paper rounds activations and gradients stochastically.
E5M2_LINEAR = LinearRecipe(input="e5m2", weight="e5m2", gradient="e5m2", overflow="inf")
E5M2_STOCHASTIC = replace(E5M2_LINEAR, rounding="stochastic")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: LinearRecipe = FP8_LINEAR,
    weight_scale: Tensor | None = None,
) -> Tensor:
    """`F.linear` in low precision: x (..., K), weight (N, K), bias (N,); the result has x's dtype.

    `weight` may already be codes of the recipe's weight format, which are multiplied without a cast; the weight's value
    is then codes · `weight_scale` (a float32 number; None means 1). Gradients have the dtypes of their tensors, but the
    gradient of codes has x's dtype (mind `Tensor.grad_dtype` of a leaf); sums are float32 throughout. Raises UsageError
    for a recipe whose formats cannot be multiplied.
    """
    if recipe.scaling not in ("unit", "amax"):
        raise UsageError(f"unknown scaling `{recipe.scaling}`", hint="known: unit, amax")
    if not torch.is_grad_enabled():
        recipe = replace(recipe, rounding="nearest")
    result: Tensor = _Linear.apply(x, weight, bias, recipe, weight_scale)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return result


def use_recipe(model: nn.Module, recipe: LinearRecipe, *, keep: Container[nn.Module] = ()) -> None:
    """Make the linear layers of `model`, except `keep`, multiply according to `recipe`; parameters are unchanged."""
    for layer in linears(model):
        if layer.is_replaceable and layer.module not in keep:
            cls: Any = type(layer.module)  # mypy treats classes of modules as unhashable
            layer.module.__class__ = _multiplying(cls, layer.kind, recipe)


@functools.cache  # one class for all layers, otherwise every block would be compiled separately
def _multiplying(cls: type[nn.Module], kind: str, recipe: LinearRecipe) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return linear(x, self.weight if kind == "Linear" else self.weight.t(), self.bias, recipe=recipe)

    return type(f"Multiplying{cls.__name__}", (cls,), {"forward": forward})


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: LinearRecipe, weight_scale: Tensor | None
    ) -> Tensor:
        x_MK, scale_x = _operand(x.reshape(-1, x.shape[-1]), recipe.input, recipe, recipe.rounding)
        is_codes = weight.dtype == code_dtype(get_format(recipe.weight)) and weight.dtype.itemsize == 1
        w_NK, scale_w = (weight, weight_scale) if is_codes else _operand(weight, recipe.weight, recipe)
        ctx.save_for_backward(x_MK, scale_x, w_NK, scale_w)
        ctx.recipe, ctx.is_codes = recipe, is_codes
        ctx.weight_dtype = x.dtype if is_codes else weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        y_MN = matmul(x_MK, w_NK.t(), scale_a=scale_x, scale_b=scale_w, bias=bias, out_dtype=x.dtype)
        return y_MN.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x_MK, scale_x, w_NK, scale_w = ctx.saved_tensors
        grad_MN = grad.reshape(-1, grad.shape[-1])
        g_MN, scale_g = _operand(grad_MN, ctx.recipe.gradient, ctx.recipe, ctx.recipe.rounding)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = matmul(g_MN, w_NK, scale_a=scale_g, scale_b=scale_w, out_dtype=grad.dtype)
            dx = dx.view(*grad.shape[:-1], w_NK.shape[1])
        if ctx.needs_input_grad[1]:
            dw = matmul(g_MN.t(), x_MK, scale_a=scale_g, scale_b=scale_x, out_dtype=ctx.weight_dtype)
            if ctx.is_codes and scale_w is not None:
                dw = dw * scale_w.to(dw.dtype)  # with respect to the codes, not to codes · scale
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = grad_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None


def _operand(
    x: Tensor, name: str, recipe: LinearRecipe, rounding: Rounding = "nearest"
) -> tuple[Tensor, Tensor | None]:
    spec = get_format(name)
    scale = tensor_scale(x, spec) if recipe.scaling == "amax" else None
    # A power of two: exact. In float32 instead of float16, whose range may be too small.
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype
    inverse = None if scale is None else (1 / scale).to(wide)
    if rounding != "nearest":
        scaled = x if inverse is None else x.to(wide) * inverse
        values = fake_quantise(scaled, spec, rounding=rounding, overflow=recipe.overflow)
        return values.to(code_dtype(spec)), scale
    if spec.bits == 8 and not (recipe.overflow == "inf" and spec.has_inf):
        return scaled_codes(x, inverse, spec, saturate=True), scale
    return (x if inverse is None else x.to(wide) * inverse).to(code_dtype(spec)), scale
