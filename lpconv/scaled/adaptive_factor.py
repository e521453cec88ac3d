"""The factor α of adaptive loss scaling, from the statistics of a gradient and a weight (arXiv 1910.12385, §3.2)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.scale import pow2_floor
from lpconv.formats.spec import get_format
from lpconv.kernels.compiled import is_compiling
from lpconv.scaled.scales import Scale, times
from lpconv.scaled.tensor import ScaledTensor


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
    lower it below 1. An all-zero or non-finite gradient gives 1.
    """
    spec = get_format(format)
    u_min = spec.min_subnormal if options.floor == "subnormal" else spec.min_normal
    num_terms = num_terms or grad.shape[-1]
    g, w = grad.float(), weight.float()
    sigma = (0.5 * num_terms * g.square().mean() * w.square().mean()).sqrt()
    lower_bound = u_min / (math.sqrt(2) * _erfinv(options.threshold) * sigma)
    amax_g, amax_w = g.abs().amax(), w.abs().amax()
    factor = lower_bound.clamp(min=1.0)
    factor = torch.minimum(factor, spec.max / num_terms / (amax_g * amax_w))
    factor = torch.minimum(factor, spec.max / amax_g)
    factor = torch.minimum(factor, times(torch.full_like(sigma, options.total_bound), scale))
    factor = pow2_floor(factor.clamp(max=options.layer_bound))
    return torch.where((sigma > 0) & sigma.isfinite(), factor, 1.0)


def _erfinv(x: float) -> float:
    return float(torch.erfinv(torch.tensor(x, dtype=torch.float64)))


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
        if is_compiling():
            return self._compute_factor(grad, weight, num_terms)
        if self.factor is None or self.num_calls % self.options.every == 0:
            self.factor = self._compute_factor(grad, weight, num_terms)
        self.num_calls += 1
        self.scale = grad.scale
        return self.factor

    def _compute_factor(self, grad: ScaledTensor, weight: Tensor, num_terms: int) -> Tensor:
        return adaptive_factor(grad.data_part, weight, grad.scale, self.format, self.options, num_terms=num_terms)
