"""Adaptive layer-wise loss scaling (Zhao et al. 2019, arXiv 1910.12385): scales in the backward pass only.

The forward pass is the plain model's. Gradients are (raw, scale) pairs with raw = gradient / scale, so 1/scale is the
cumulative loss scale s of the paper. At each linear layer and convolution, a factor α, chosen from the statistics of
the incoming gradient and the weight, multiplies the input's gradient; parameters receive true gradients, unscaled in
fp32.

Departures from the authors' code: parameter gradients are unscaled in fp32 (fp16 would lose the gain again), the bounds
on α and on s are wide by default (2^16 and 2^40 instead of 16 and 1024), joins bound the sum of the magnitudes instead
of the largest, and casts from fp32 to 16 bits choose a scale that fits, as joins do. Factors and scales stay on the
device; nothing is read from it.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lpconv.errors import UsageError
from lpconv.formats.scale import amax, pow2_floor
from lpconv.formats.spec import get_format
from lpconv.kernels.compiled import COMPILES_SUBCLASSES, is_compiling
from lpconv.kernels.matmul import at_half
from lpconv.layers import convolutions, linears
from lpconv.lookup import find
from lpconv.scaled.model import COMPUTE, Scaling, refuse_scaled, return_plain
from lpconv.scaled.operands import product
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.scales import Scale, times
from lpconv.scaled.tensor import ScaledTensor, scaled_tensor


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions:
    """Options of adaptive loss scaling: how a layer chooses its factor α.

    `threshold` is the fraction of a layer's gradient elements that may underflow, i.e. fall below `floor`: "subnormal",
    the smallest number of the format, or "normal", below which precision is lost. `layer_bound` bounds α and
    `total_bound` the cumulative loss scale. α is updated at every `every`-th backward pass of a layer. `casts` is how a
    gradient in fp32 is cast to 16 bits: "fit", at a scale at which it fits, or "lognormal", at a larger loss scale with
    headroom, which loses the fraction `threshold` of a log-normal distribution of magnitudes.
    """

    threshold: float = 1e-3
    floor: str = "subnormal"
    layer_bound: float = 2.0**16
    total_bound: float = 2.0**40
    every: int = 1
    casts: str = "fit"

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise UsageError(
                f"threshold={self.threshold} is not a fraction between 0 and 1", hint="the paper uses 1e-3"
            )
        if self.floor not in ("subnormal", "normal"):
            raise UsageError(f"unknown floor `{self.floor}`", hint="known: subnormal, normal")
        if self.casts not in ("fit", "lognormal"):
            raise UsageError(f"unknown kind of casts `{self.casts}`", hint="known: fit, lognormal")
        if self.every < 1 or self.layer_bound < 1 or self.total_bound < 1:
            raise UsageError(
                "every, layer_bound and total_bound must be at least 1", hint="leave them out for the defaults"
            )


def adaptive_factor(
    grad: Tensor, weight: Tensor, scale: Scale, format: str, options: AdaptiveOptions, *, num_terms: int | None = None
) -> Tensor:
    """The power-of-two factor α for a raw gradient and the weight it is multiplied by [§3.2].

    Each element of the input's gradient sums n products. n is `num_terms`, by default N_out, the last axis of `grad`;
    N_out·k_h·k_w for a convolution. Elements of G and W are assumed independent, so an element of G·W has σ_o =
    √(½·n·E[g²]·E[w²]) (½: the paper's ReLU assumption), and P(|α·o| < u_min) = erf(u_min/(√2·α·σ_o)) ≤ T gives α ≥
    u_min/(√2·erfinv(T)·σ_o). α is at least 1, then bounded by the range of the dot product and of the gradient, by
    `total_bound`·scale and by `layer_bound`, in this order, and rounded down to a power of two; the first bounds may
    lower it below 1. An empty, all-zero or non-finite gradient gives 1.
    """
    spec = get_format(format)
    u_min = spec.min_subnormal if options.floor == "subnormal" else spec.min_normal
    num_terms = num_terms or grad.shape[-1]
    g, w = grad.float(), weight.float()
    sigma = (0.5 * num_terms * g.square().mean() * w.square().mean()).sqrt()
    erfinv = float(torch.erfinv(torch.tensor(options.threshold, dtype=torch.float64)))
    lower_bound = u_min / (math.sqrt(2) * erfinv * sigma)
    amax_g, amax_w = amax(g), amax(w)
    factor = lower_bound.clamp(min=1.0)
    factor = torch.minimum(factor, spec.max / num_terms / (amax_g * amax_w))
    factor = torch.minimum(factor, spec.max / amax_g)
    factor = torch.minimum(factor, times(torch.full_like(sigma, options.total_bound), scale))
    factor = pow2_floor(factor.clamp(max=options.layer_bound))
    return torch.where((sigma > 0) & sigma.isfinite(), factor, 1.0)


@dataclass(kw_only=True)
class LayerState:
    """A layer's factor, the scale of its last gradient, and its number of backward passes."""

    options: AdaptiveOptions
    dtype: torch.dtype
    format: str
    factor: Tensor | None = None
    scale: Scale = 1.0
    num_calls: int = 0

    def factor_for(self, grad: ScaledTensor, weight: Tensor, num_terms: int) -> Tensor:
        """α for this backward pass, updated at every `every`-th one; a compiled graph updates it each time."""
        factor = None if is_compiling() or self.num_calls % self.options.every == 0 else self.factor
        if factor is None:
            data, scale = grad.data_part, grad.scale
            factor = adaptive_factor(data, weight, scale, self.format, self.options, num_terms=num_terms)
        if not is_compiling():
            self.factor, self.scale = factor, grad.scale
            self.num_calls += 1
        return factor


aten = torch.ops.aten

_PLAIN = Numerics()  # no formats: operands are multiplied without a cast


def adaptive_scaling(
    model: nn.Module, *, compute: str = "fp16", options: AdaptiveOptions | None = None, strict: bool = False
) -> nn.Module:
    """Scale the gradients of each linear layer and convolution by its own factor; changes `model` in place.

    The forward pass and the parameters stay plain; it runs under autocast to `compute` ("fp16", "bf16" or "fp32").
    Parameters receive plain gradients, so any optimizer can be used. `strict` is as in `lpconv.scaled.scaled`. Raises
    `UsageError` for unknown names and for a model that is already scaled.
    """
    spec = find("compute", compute, COMPUTE)
    if spec.operand is not None:
        raise UsageError(f"adaptive loss scaling cannot compute in {compute}", hint="use compute='fp16' or 'bf16'")
    dtype = spec.carrier
    refuse_scaled(model)
    options = options or AdaptiveOptions()
    modules = [layer.module for layer in linears(model) if layer.is_replaceable] + convolutions(model)
    for module in modules:
        # Same outputs, but gradients scaled by the factors of the state.
        module.adaptive = LayerState(options=options, dtype=dtype, format=compute)  # type: ignore[assignment]  # not a tensor or module
        module.__class__ = _CLASSES[type(module)]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_unscale)  # type: ignore[no-untyped-call]
    underflow = options.threshold if options.casts == "lognormal" else 0.0
    numerics = Numerics(unit_factors=False, fit_joins=True, cast_underflow=underflow, strict=strict)
    unit = scaled_tensor(torch.ones(()), 1.0, role=Role.GRADIENT, numerics=numerics)
    scaling = Scaling(
        method="adaptive", compute=compute, numerics=numerics, scales={}, saved=None, unit=unit, autocast=dtype
    )
    return return_plain(model, scaling)


def _unscale(grad: Tensor) -> Tensor:
    return grad.dequantize(grad.dtype) if isinstance(grad, ScaledTensor) else grad


def loss_scales(model: nn.Module) -> dict[str, tuple[float, float]]:
    """For each adaptive layer, the cumulative loss scale that reached it in the last backward pass, and its α."""
    return {
        name: (1 / float(state.scale), float(state.factor))
        for name, module in model.named_modules()
        if isinstance(state := getattr(module, "adaptive", None), LayerState) and state.factor is not None
    }


class _Matmul:
    """x·Wᵀ + b for 2-D x, and its derivatives; W is (N_out, N_in)."""

    def num_terms(self, weight: Tensor) -> int:
        """Number of products in the sum of each element of the input's gradient."""
        return weight.shape[0]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(_PLAIN, x, weight.t(), bias=bias)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return product(_PLAIN, grad, weight)

    def parameter_gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the weight and of a bias."""
        return grad.t() @ x, grad.sum(0)


class _Convolution(NamedTuple):
    """Like `_Matmul` for a convolution of (batch, N_in, positions…) with W (N_out, N_in / groups, kernel…)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def num_terms(self, weight: Tensor) -> int:
        """N_out·k_h·k_w per group, as in the paper; with strides there are fewer terms, and α is too low."""
        return weight[:, 0].numel() // self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = at_half(aten.convolution.default, x, weight, bias, *self._settings())
        return out

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, [True, False, False])[0]

    def parameter_gradients(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        _, of_weight, of_bias = self._backward(grad, x, weight.to(grad.dtype), [False, True, True])
        return of_weight, of_bias

    def _settings(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        op, sizes = aten.convolution_backward.default, [weight.shape[0]]
        grads: tuple[Tensor, ...] = at_half(op, grad, x, weight, sizes, *self._settings(), mask)
        return grads


_Product: TypeAlias = _Matmul | _Convolution


class _Adaptive(torch.autograd.Function):
    """A product in the dtype of the state, whose backward pass multiplies the input's gradient by α [§3]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, product: _Product
    ) -> Tensor:
        weight_lp = weight.to(state.dtype)
        ctx.save_for_backward(x, weight_lp)
        ctx.state, ctx.product = state, product
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        return product.forward(x, weight_lp, None if bias is None else bias.to(state.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        raw, scale = (grad.data_part, grad.scale) if isinstance(grad, ScaledTensor) else (grad, 1.0)
        of_weight, of_bias = ctx.product.parameter_gradients(raw.float(), x.float(), weight)
        grad_weight = times(of_weight, scale).to(ctx.weight_dtype)
        grad_bias = None if ctx.bias_dtype is None else times(of_bias, scale).to(ctx.bias_dtype)
        if not isinstance(grad, ScaledTensor):
            return ctx.product.input_gradient(raw, x, weight), grad_weight, grad_bias, None, None
        factor = ctx.state.factor_for(grad, weight, ctx.product.num_terms(weight))
        grad_data = ctx.product.input_gradient(times(raw, factor), x, weight)
        grad_input = ScaledTensor(grad_data, scale / factor, Role.GRADIENT, grad.numerics)
        return grad_input, grad_weight, grad_bias, None, None


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, product: _Product) -> Tensor:
    out: Tensor = _Adaptive.apply(x, weight, bias, state, product)  # type: ignore[no-untyped-call]
    return out


_MATMUL = _Matmul()
if not COMPILES_SUBCLASSES:  # its graph of an autograd function takes scaled gradients for plain ones, and loses them
    _apply = torch.compiler.disable(_apply)  # type: ignore[no-untyped-call]


class _AdaptiveLinear(nn.Linear):
    """`nn.Linear` whose backward pass scales the input's gradient."""

    def forward(self, input: Tensor) -> Tensor:
        return _multiply(input, self.weight, self.bias, self.adaptive)  # type: ignore[arg-type]  # nn.Module's __getattr__


class _AdaptiveConv1D(Conv1D):  # type: ignore[misc]  # transformers is untyped
    """GPT-2's linear layer, with a weight (N_in, N_out), whose backward pass scales the input's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(x, self.weight.t(), self.bias, self.adaptive)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState) -> Tensor:
    rows = x.to(state.dtype).reshape(-1, x.shape[-1])
    out = _apply(rows, weight, bias, state, _MATMUL)
    return out.view(*x.shape[:-1], out.shape[-1])


class _Convolving:
    """torch's convolutions, but with `_Adaptive` in place of `F.conv…d`; padding is as in torch."""

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, padding = input.to(self.adaptive.dtype), self.padding
        if self.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=mode), (0,) * len(self.stride)
        is_batch = x.dim() == weight.dim()
        convolution = _Convolution(self.stride, padding, self.dilation, self.groups)
        out = _apply(x if is_batch else x[None], weight, bias, self.adaptive, convolution)
        return out if is_batch else out[0]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _AdaptiveLinear,
    Conv1D: _AdaptiveConv1D,
    **{base: type(f"Adaptive{base.__name__}", (_Convolving, base), {}) for base in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
}
