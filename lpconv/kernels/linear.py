"""A linear layer whose three products (output, input gradient, weight gradient) run in low precision.

    y_MN = x_MK @ w_NKᵀ        dx_MK = g_MN @ w_NK        dw_NK = g_MNᵀ @ x_MK

A scale must be constant along the summed dimension. With scales per row or block (`kernels.operands`), x and w are
therefore cast twice: along K for the output, and along M or N for the gradients. One scale per tensor serves both. For
the backward pass, x is saved as codes, one byte per element in fp8. On CUDA they are saved transposed, because tensor
cores need both operands row-major along the summed dimension, and a compiler can write the transpose while casting. The
weight is in memory anyway, so a GPU casts it again.

In eager mode, several linear layers with the same input (query, key, value) each cast it and save codes. A compiler
merges these casts if the layers share the scale of their input; see `calibrate`.
"""

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lpconv.errors import UsageError
from lpconv.formats.codes import code_dtype
from lpconv.formats.scale import pow2_nearest
from lpconv.formats.spec import OPERAND_BLOCKS
from lpconv.kernels.operands import (
    Coded,
    OperandCast,
    coded_product,
    encode_at,
    encode_operand,
    inverse_scale,
    random_signs,
)
from lpconv.layers import blocks_of, linears

_E4M3, _E5M2 = OperandCast(), OperandCast(format="e5m2")
_HISTORY = 16  # calls that delayed scaling looks back on; TransformerEngine's default is 1024, to the same end


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """How the operands of a Linear's products are cast.

    `rotates_grad_weight`: both operands of the weight gradient are rotated before the cast (see `OperandCast`).
    `wide_share` of the model's blocks, the last ones, keep wide products: they lose most (arXiv 2509.25149).

    Stochastic rounding takes torch's generator, and nothing is rounded by chance where no gradient is wanted, so that
    evaluating needs no seed.
    """

    input: OperandCast = _E4M3
    weight: OperandCast = _E4M3
    gradient: OperandCast = _E5M2
    rotates_grad_weight: bool = False
    wide_share: float = 0.0

    @property
    def is_unbiased(self) -> bool:
        """Whether MS-EDEN casts both operands of the gradients' products, from the operands of the forward pass."""
        return self.gradient.scale == "ms-eden"

    @property
    def grad_weight_casts(self) -> tuple[OperandCast, OperandCast]:
        """The casts of input and gradient for the gradient of the weight."""
        if self.is_unbiased:
            return self.gradient, self.gradient
        if not self.rotates_grad_weight:
            return self.input, self.gradient
        return replace(self.input, rotated=True), replace(self.gradient, rotated=True)


def fp8_recipe(scale: str) -> LinearRecipe:
    """Recipe with e4m3fn operands and one kind of scale; gradients use e5m2 if the tensor has one scale.

    With finer scales, gradients need no wider range than other tensors (torchao and TransformerEngine use e4m3fn, too).
    """
    operand = replace(_E4M3, scale=scale)
    gradient = replace(_E5M2, scale=scale) if operand.has_one_scale else operand
    return LinearRecipe(input=operand, weight=operand, gradient=gradient)


FP8_RECIPES = {scale: fp8_recipe(scale) for scale in ("static", "tensor", "delayed", "row", "mx")}
FP8_LINEAR = LinearRecipe()


def fp4_recipe(scale: str) -> LinearRecipe:
    """Recipe with e2m1 operands and one kind of scale; for nvfp4 it is the recipe of TransformerEngine."""
    operand = OperandCast(format="e2m1", scale=scale)
    return LinearRecipe(
        input=operand,
        weight=replace(operand, square=scale.startswith("nvfp4")),
        gradient=replace(operand, rounding="stochastic"),
        rotates_grad_weight=scale in OPERAND_BLOCKS,
        wide_share=0.15,
    )


FP4_RECIPES = {scale: fp4_recipe(scale) for scale in ("nvfp4", "nvfp4-static", "mx", "row", "static")}
# Quartet II (Panferov et al. 2026, arXiv 2601.22813): unbiased gradients without stochastic rounding of elements.
_FOUR_SIX = OperandCast(format="e2m1", scale="four-six")
FP4_RECIPES["ms-eden"] = LinearRecipe(
    input=_FOUR_SIX, weight=_FOUR_SIX, gradient=OperandCast(format="e2m1", scale="ms-eden")
)
_FP16, _E5M2_WITH_INF = OperandCast(format="fp16"), OperandCast(format="e5m2", overflow="inf")
_STOCHASTIC = replace(_E5M2_WITH_INF, rounding="stochastic")
FP16_LINEAR = LinearRecipe(input=_FP16, weight=_FP16, gradient=_FP16)
# Mixed precision with 8-bit floats (Mellempudi et al. 2019, arXiv 1905.12334): e5m2 everywhere, and a loss scale. The
# paper rounds activations and gradients stochastically.
E5M2_LINEAR = LinearRecipe(input=_E5M2_WITH_INF, weight=_E5M2_WITH_INF, gradient=_E5M2_WITH_INF)
E5M2_STOCHASTIC = replace(E5M2_LINEAR, input=_STOCHASTIC, gradient=_STOCHASTIC)


class States(NamedTuple):
    """State of the operands' scales: a calibrated scale for "static", a history of magnitudes for "delayed"."""

    input: Tensor | None = None
    weight: Tensor | None = None
    gradient: Tensor | None = None


_NO_STATES = States()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: LinearRecipe = FP8_LINEAR,
    weight_scale: Tensor | None = None,
    states: States = _NO_STATES,
) -> Tensor:
    """`F.linear` in low precision: x (..., K), weight (N, K), bias (N,); the result has x's dtype.

    `weight` may already be codes of the recipe's weight format, which are multiplied without a cast; the weight's value
    is then codes · `weight_scale` (float32: one number, or one per row or block; None means 1). Gradients have the
    dtypes of their tensors, but the gradient of codes has x's dtype (mind `Tensor.grad_dtype` of a leaf); sums are
    float32 throughout. Raises UsageError for a recipe whose formats cannot be multiplied.
    """
    if recipe.input.rounding != "nearest" and not torch.is_grad_enabled():
        recipe = replace(recipe, input=replace(recipe.input, rounding="nearest"))
    apply = _eager if recipe.is_unbiased else _Linear.apply
    result: Tensor = apply(x, weight, bias, weight_scale, recipe, states)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor | None,
        recipe: LinearRecipe,
        states: States,
    ) -> Tensor:
        flat_MK = x.reshape(-1, x.shape[-1])
        into = None if recipe.input.has_one_scale else "left"  # else its codes are kept
        x_MK = encode_operand(flat_MK, recipe.input, axis=-1, state=states.input, into=into)
        x_codes, x_scale = None, None
        if ctx.needs_input_grad[1] and recipe.is_unbiased:
            x_codes = x_MK.decoded(x.dtype)[:, : x.shape[-1]]
        elif ctx.needs_input_grad[1]:
            x_codes, x_scale = _transpose_operand(x_MK, flat_MK, recipe.grad_weight_casts[0])
        ctx.has_codes = _is_codes(weight, recipe.weight)
        w_NK, w_kept, w_factor = _weight(weight, weight_scale, recipe.weight, states.weight)
        ctx.save_for_backward(x_codes, _tensor(x_scale), w_kept, w_factor)
        ctx.recipe, ctx.states = recipe, states
        ctx.weight_dtype = x.dtype if ctx.has_codes else weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return coded_product(x_MK, w_NK, bias=bias, out_dtype=x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable  # casts have no derivative, so a second backward pass would lose terms
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x_codes, x_scale, w_kept, w_factor = ctx.saved_tensors
        how, is_unbiased = ctx.recipe.gradient, ctx.recipe.is_unbiased
        grad_MN = grad.reshape(-1, grad.shape[-1])
        state = random_signs(grad.device) if is_unbiased else ctx.states.gradient
        g_MN = encode_operand(grad_MN, how, axis=-1, state=state, into="left")
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if is_unbiased:
                w_NK = encode_operand(w_kept, ctx.recipe.weight, axis=-1).decoded(grad.dtype)[:, : w_kept.shape[1]]
                w_KN = encode_operand(w_NK.t(), how, axis=-1, state=state)
            else:
                w_KN = _turned(w_kept, w_factor, ctx.recipe.weight, ctx.states.weight)
            dx = coded_product(g_MN, w_KN, out_dtype=grad.dtype).view(*grad.shape[:-1], w_kept.shape[1])
        if ctx.needs_input_grad[1]:
            g_NM = _transpose_operand(g_MN, grad_MN, ctx.recipe.grad_weight_casts[1], state=state, into="left")
            x_KM = Coded(x_codes, 1.0 if x_scale is None else x_scale)
            if is_unbiased:
                x_KM = encode_operand(x_codes.t(), how, axis=-1, state=state)
            dw = coded_product(g_NM, x_KM, out_dtype=ctx.weight_dtype)
            if ctx.has_codes and w_factor is not None:
                dw = dw * w_factor.to(dw.dtype)  # with respect to the codes, not to codes · scale
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = grad_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None


# A compiler may draw the signs of MS-EDEN twice, once for each operand of a product (torch 2.13): with Inductor
# gradients had an error of 140 %.
_eager = torch.compiler.disable(_Linear.apply)  # type: ignore[no-untyped-call]  # untyped in torch


def _transpose_operand(
    along: Coded, x: Tensor, cast: OperandCast, *, state: Tensor | None = None, into: str | None = None
) -> Coded:
    """Cast the transpose of `x` (R, C) along R; `along` is `x` cast along C."""
    if not cast.has_one_scale:
        return encode_operand(x.t(), cast, axis=-1, state=state, into=into)
    return _device_layout(along.mT)


def _weight(
    weight: Tensor, scale: Tensor | None, cast: OperandCast, state: Tensor | None
) -> tuple[Coded, Tensor, Tensor | None]:
    """Cast the weight along K. Also returns the arguments of `_turned`: codes and scale, or the weight and its factor.

    A CPU keeps the codes for both products, at one byte per element, because casting takes longer than decoding.
    """
    if scale is not None or _is_codes(weight, cast):
        return Coded(weight, 1.0 if scale is None else scale), weight, scale
    inverse = inverse_scale(weight, cast, axis=-1, state=state)
    w_NK = encode_at(weight, inverse, cast, state=state, into="right")
    if cast.has_one_scale and not weight.is_cuda and _is_codes(w_NK.codes, cast):
        return w_NK, w_NK.codes, _tensor(w_NK.scale)
    return w_NK, weight, inverse


def _turned(weight: Tensor, factor: Tensor | None, cast: OperandCast, state: Tensor | None) -> Coded:
    """Cast the weight along N, from the values that `_weight` returned.

    The weight is transposed before the cast; otherwise a compiler would reuse the first cast and keep its codes.
    """
    if _is_codes(weight, cast):
        return Coded(weight, 1.0 if factor is None else factor).mT
    if not cast.has_one_scale:
        return encode_operand(weight.t(), cast, axis=-1, into="right")
    return _device_layout(encode_at(weight.t(), factor, cast, state=state, into="right"))


def _is_codes(weight: Tensor, cast: OperandCast) -> bool:
    return weight.dtype == code_dtype(cast.spec) and weight.dtype.itemsize == 1


def _device_layout(x: Coded) -> Coded:
    """Make codes row-major for tensor cores. A CPU decodes them anyway, so they stay unchanged there."""
    return Coded(x.codes.contiguous(), x.scale) if x.codes.is_cuda and x.codes.itemsize == 1 else x


def _tensor(scale: float | Tensor | None) -> Tensor | None:
    return scale if isinstance(scale, Tensor) else None


class Multiplying(nn.Module):
    """Linear (or GPT-2's Conv1D) that multiplies according to `recipe`; `use_recipe` changes layers to this class.

    Scales of "static" and histories of "delayed" operands are buffers (`input_state`, `weight_state`,
    `gradient_state`); so is the `weight_scale` of a frozen weight.
    """

    recipe: LinearRecipe
    has_turned_weight: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., K) to (..., N)."""
        scale = self._buffers.get("weight_scale")
        return linear(x, self.weight_NK, self.bias, recipe=self.recipe, weight_scale=scale, states=self.states)

    @property
    def weight_NK(self) -> Tensor:
        """The weight of a Linear."""
        return self.weight.t() if self.has_turned_weight else self.weight

    @property
    def states(self) -> States:
        """The buffers with the state of the scales."""
        known = self._buffers
        return States(known.get("input_state"), known.get("weight_state"), known.get("gradient_state"))

    @torch.no_grad()
    def freeze(self) -> None:
        """Cast the weight once and drop its high-precision values. Not reversible, and the weight gets no gradient."""
        found = _device_layout(encode_operand(self.weight_NK, self.recipe.weight, axis=-1, state=self.states.weight))
        self.weight = nn.Parameter(found.codes.t() if self.has_turned_weight else found.codes, requires_grad=False)
        self.register_buffer("weight_scale", found.scale.clone() if isinstance(found.scale, Tensor) else None)


def use_recipe(model: nn.Module, recipe: LinearRecipe, *, keep: Container[nn.Module] = ()) -> list[str]:
    """Make the linear layers of `model` multiply according to `recipe`, except `keep` and wide ones. Returns names.

    Parameters remain the same objects.
    """
    wide = wide_modules(model, recipe)
    found = [x for x in linears(model) if x.is_replaceable and x.module not in keep and x.module not in wide]
    for layer in found:
        cls: Any = type(layer.module)  # mypy takes classes of modules for unhashable
        layer.module.__class__ = _multiplying(cls, layer.kind, recipe)
        for role in States._fields:
            if getattr(recipe, role).scale == "delayed":
                device = layer.module.get_parameter("weight").device
                layer.module.register_buffer(f"{role}_state", torch.ones(_HISTORY, device=device))
    return [layer.name for layer in found]


def wide_modules(model: nn.Module, recipe: LinearRecipe) -> set[nn.Module]:
    """The linear layers of the last blocks, which `recipe` leaves in a wider format."""
    blocks = blocks_of(model)
    last = blocks[len(blocks) - int(recipe.wide_share * len(blocks)) :]
    return {layer.module for block in last for layer in linears(block)}


@functools.cache  # one class for all layers, or every block would be compiled by itself
def _multiplying(cls: type[nn.Module], kind: str, recipe: LinearRecipe) -> type[nn.Module]:
    facts = {"recipe": recipe, "has_turned_weight": kind != "Linear"}
    return type(f"Multiplying{cls.__name__}", (Multiplying, cls), facts)


def calibrate(model: nn.Module, step: Callable[[], object]) -> None:
    """Set the scales of "static" operands in `model` from one run of `step`, which calls it (and may go back).

    Each scale is the power of two nearest to the root mean square: elements then lie around 1, where every format is
    densest. Layers that read the same tensor share the scale of their inputs, so that a compiler casts it once.
    """
    layers = [m for m in model.modules() if isinstance(m, Multiplying) and m.recipe.weight.scale == "static"]
    last: list[tuple[Tensor, Tensor]] = []

    def before(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not last or last[0][0] is not args[0]:
            last[:] = [(args[0], _unit_scale(args[0]))]
        layer.register_buffer("input_state", last[0][1])

    def after(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            state = layer.get_buffer("gradient_state")  # in place, for the backward pass that has begun
            output.register_hook(lambda grad: state.copy_(_unit_scale(grad)) and None)  # type: ignore[no-untyped-call]

    for layer in layers:
        layer.register_buffer("weight_state", _unit_scale(layer.weight))
        layer.register_buffer("gradient_state", torch.ones((), device=layer.weight.device))
    handles = [h for m in layers for h in (m.register_forward_pre_hook(before), m.register_forward_hook(after))]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _unit_scale(x: Tensor) -> Tensor:
    rms = float(x.float().square().mean().sqrt()) if x.numel() else 0.0
    if not rms < float("inf"):
        raise UsageError("cannot scale a tensor that is not finite", hint="look for the step that broke it")
    return torch.tensor(max(pow2_nearest(rms), 2.0**-60) if rms > 0 else 1.0, device=x.device)
