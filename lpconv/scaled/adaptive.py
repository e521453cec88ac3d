"""Adaptive layer-wise loss scaling (Zhao et al. 2019, arXiv 1910.12385): scales in the backward pass only.

The forward pass is the plain model's. Gradients travel as (raw, scale) pairs, raw = gradient / scale, so 1/scale is the
cumulative loss scale s of the paper. At each linear layer a factor α, chosen from the statistics of the incoming
gradient and the weight, multiplies what is handed down; parameters receive true gradients, unscaled in fp32.

Departures from the authors' code: parameter gradients are unscaled in fp32 (in fp16 the gain is lost again), the bounds
on α and on s are wide by default (2^16 and 2^40 instead of 16 and 1024), joins bound the sum of the magnitudes instead
of the largest, and casts from fp32 to 16 bits choose a scale that fits, as joins do. Factors and scales stay on the
device; nothing is read back.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lpconv.errors import UsageError
from lpconv.formats.scale import pow2_floor
from lpconv.formats.spec import get_format
from lpconv.layers import linears
from lpconv.lookup import find
from lpconv.scaled.model import COMPUTE, Scaling, leave_plain, refuse_scaled
from lpconv.scaled.operands import product
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.scales import Scale, times
from lpconv.scaled.tensor import ScaledTensor, scaled_tensor

__all__ = ["AdaptiveOptions", "LayerState", "adaptive_factor", "adaptive_scaling", "loss_scales"]


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions:
    """How a layer chooses α.

    `threshold` is the share of a layer's gradient elements that may underflow, `floor` says below what: "subnormal",
    the smallest number of the format, or "normal", from where on precision is lost. `layer_bound` bounds α and
    `total_bound` the cumulative loss scale. α is chosen anew at every `every`-th backward pass of a layer.
    """

    threshold: float = 1e-3
    floor: str = "subnormal"
    layer_bound: float = 2.0**16
    total_bound: float = 2.0**40
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise UsageError(f"threshold={self.threshold} is not a share between 0 and 1", hint="the paper uses 1e-3")
        if self.floor not in ("subnormal", "normal"):
            raise UsageError(f"unknown floor `{self.floor}`", hint="known: subnormal, normal")
        if self.every < 1 or self.layer_bound < 1 or self.total_bound < 1:
            raise UsageError(
                "every, layer_bound and total_bound are at least 1", hint="leave them out for the defaults"
            )


def adaptive_factor(grad: Tensor, weight: Tensor, scale: Scale, format: str, options: AdaptiveOptions) -> Tensor:
    """α, a power of two, for `grad` (rows × N_out, raw) against `weight` with N_out·N_in elements [§3.2].

    Elements of G and W are taken as independent, so an element of G·W has σ_o = √(½·N_out·E[g²]·E[w²]) (½: the paper's
    ReLU assumption), and P(|α·o| < u_min) = erf(u_min/(√2·α·σ_o)) ≤ T gives α ≥ u_min/(√2·erfinv(T)·σ_o). α is at least
    1, then bounded by what the dot product, the gradient, `total_bound`·scale and `layer_bound` allow, in this order,
    and floored to a power of two; the first bounds may lower it below 1. An all-zero or non-finite gradient gives 1.
    """
    spec = get_format(format)
    u_min = spec.min_subnormal if options.floor == "subnormal" else spec.min_normal
    num_out = grad.shape[-1]
    g, w = grad.float(), weight.float()
    sigma = (0.5 * num_out * g.square().mean() * w.square().mean()).sqrt()
    wanted = u_min / (math.sqrt(2) * _erfinv(options.threshold) * sigma)
    amax_g, amax_w = g.abs().amax(), w.abs().amax()
    factor = wanted.clamp(min=1.0)
    factor = torch.minimum(factor, spec.max / num_out / (amax_g * amax_w))
    factor = torch.minimum(factor, spec.max / amax_g)
    factor = torch.minimum(factor, times(torch.full_like(sigma, options.total_bound), scale))
    factor = pow2_floor(factor.clamp(max=options.layer_bound))
    return torch.where((sigma > 0) & sigma.isfinite(), factor, 1.0)


def _erfinv(x: float) -> float:
    return float(torch.erfinv(torch.tensor(x, dtype=torch.float64)))


@dataclass(kw_only=True)
class LayerState:
    """A layer's factor, the scale of the gradient it saw last, and how often it was asked."""

    options: AdaptiveOptions
    dtype: torch.dtype
    format: str
    factor: Tensor | None = None
    scale: Scale = 1.0
    num_calls: int = 0

    def factor_for(self, grad: ScaledTensor, weight: Tensor) -> Tensor:
        """α for this backward pass, chosen anew every `every`-th time; a compiled graph chooses it each time."""
        if torch.compiler.is_compiling():
            return adaptive_factor(grad.data_part, weight, grad.scale, self.format, self.options)
        if self.factor is None or self.num_calls % self.options.every == 0:
            self.factor = adaptive_factor(grad.data_part, weight, grad.scale, self.format, self.options)
        self.num_calls += 1
        self.scale = grad.scale
        return self.factor


_PLAIN = Numerics()  # names no formats: operands are multiplied as they are


class _AdaptiveMatmul(torch.autograd.Function):
    """x·Wᵀ + b for 2-D x in the dtype of the state; W is (N_out, N_in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState) -> Tensor:
        weight_lp = weight.to(state.dtype)
        ctx.save_for_backward(x, weight_lp)
        ctx.state, ctx.weight_dtype, ctx.bias_dtype = state, weight.dtype, None if bias is None else bias.dtype
        return product(_PLAIN, x, weight_lp.t(), bias=None if bias is None else bias.to(state.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        raw, scale = (grad.data_part, grad.scale) if isinstance(grad, ScaledTensor) else (grad, 1.0)
        grad_weight = times(raw.float().t() @ x.float(), scale).to(ctx.weight_dtype)
        grad_bias = None if ctx.bias_dtype is None else times(raw.float().sum(0), scale).to(ctx.bias_dtype)
        if not isinstance(grad, ScaledTensor):
            return product(_PLAIN, raw, weight), grad_weight, grad_bias, None
        factor = ctx.state.factor_for(grad, weight)
        handed_down = product(_PLAIN, times(raw, factor), weight)
        return ScaledTensor(handed_down, scale / factor, Role.GRADIENT, grad.numerics), grad_weight, grad_bias, None


class _AdaptiveLinear(nn.Linear):
    """`nn.Linear` whose backward pass scales what it hands down."""

    def forward(self, input: Tensor) -> Tensor:
        return _apply(input, self.weight, self.bias, self.adaptive)  # type: ignore[arg-type]  # nn.Module's __getattr__


class _AdaptiveConv1D(Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's linear layer, whose weight is (N_in, N_out)."""

    def forward(self, x: Tensor) -> Tensor:
        return _apply(x, self.weight.t(), self.bias, self.adaptive)


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState) -> Tensor:
    rows = x.to(state.dtype).reshape(-1, x.shape[-1])
    out: Tensor = _AdaptiveMatmul.apply(rows, weight, bias, state)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], out.shape[-1])


def adaptive_scaling(
    model: nn.Module, *, compute: str = "fp16", options: AdaptiveOptions | None = None, strict: bool = False
) -> nn.Module:
    """`model`, changed in place so that its backward pass chooses a loss scale for each linear layer, as `options` say.

    The forward pass and the parameters stay plain; it runs under autocast to `compute` ("fp16", "bf16" or "fp32").
    Parameters receive plain gradients, so any optimizer will do. `strict` is that of `lpconv.scaled.scaled`. Raises
    `UsageError` for unknown names and a model scaled before.
    """
    if compute == "fp8":
        raise UsageError("adaptive loss scaling has no fp8 compute", hint="use compute='fp16' or 'bf16'")
    dtype = find("compute", compute, COMPUTE).carrier
    refuse_scaled(model)
    for layer in linears(model):
        if layer.is_replaceable:
            layer.module.__class__ = _AdaptiveLinear if layer.kind == "Linear" else _AdaptiveConv1D
            layer.module.adaptive = LayerState(options=options or AdaptiveOptions(), dtype=dtype, format=compute)  # type: ignore[assignment]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_unscaled)  # type: ignore[no-untyped-call]
    numerics = Numerics(unit_factors=False, fit_joins=True, strict=strict)
    unit = scaled_tensor(torch.ones(()), 1.0, role=Role.GRADIENT, numerics=numerics)
    scaling = Scaling(
        method="adaptive", compute=compute, numerics=numerics, scales={}, saved=None, unit=unit, autocast=dtype
    )
    return leave_plain(model, scaling)


def _unscaled(grad: Tensor) -> Tensor:
    return grad.dequantize(grad.dtype) if isinstance(grad, ScaledTensor) else grad


def loss_scales(model: nn.Module) -> dict[str, tuple[float, float]]:
    """(cumulative loss scale that arrived, factor α applied) of each adaptive layer in the last backward pass."""
    states = {n: m.adaptive for n, m in model.named_modules() if isinstance(getattr(m, "adaptive", None), LayerState)}
    return {
        name: (1 / float(state.scale), float(state.factor))
        for name, state in states.items()
        if isinstance(state, LayerState) and state.factor is not None
    }
