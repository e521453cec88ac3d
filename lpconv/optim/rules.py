"""Update rules in fp32: weight, gradient and moments in, weight and moments out, independent of storage.

Each is the torch.optim algorithm of its name (Lion: arXiv 2302.06675). Everything that changes from step to step is
folded into a few coefficients, computed in fp64 on the host. Coefficients near 1 need care: in fp32, 1 - lr · decay is
off by up to 3e-8, which is 0.3 % of a decay of 1e-5 and all of a decay of 1e-8. So the decay is subtracted, and beta2
is an fp32 pair.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

Moments: TypeAlias = tuple[Tensor, ...]
Coefficients: TypeAlias = tuple[float, ...]
Update: TypeAlias = Callable[[Tensor, Tensor, Moments, tuple[Tensor, ...]], tuple[Tensor, Moments]]


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """An update rule: `update(x, g, moments, coefficients)` with fp32 tensors of one shape and 0-dim fp32 coefficients.

    `coefficients(group, step)` computes these from a parameter group's options, with steps counted from 1.
    `decays(group)` is the factor on each moment after a step with a gradient of 0. `gain(moments, coefficients)` is the
    factor with which the rounding error of a bf16 weight is added to the first moment.
    """

    name: str
    moments: tuple[str, ...]
    decays: Callable[[Mapping[str, Any]], tuple[float, ...]]
    coefficients: Callable[[Mapping[str, Any], int], Coefficients]
    update: Update
    gain: Callable[[Moments, tuple[Tensor, ...]], Tensor] | None = None


def _sign(group: Mapping[str, Any]) -> float:
    return -1.0 if group["maximize"] else 1.0


def unit_adamw(group: Mapping[str, Any]) -> tuple[float, float, float]:
    """(lr, eps, weight decay) for the data Ŵ, equivalent to the group's own for W = σ·Ŵ with σ its `weight_scale`.

    AdamW's step depends on the size of the gradient only through eps, and the gradient with respect to Ŵ is σ times
    larger.
    """
    scale = group.get("weight_scale", 1.0)
    return float(group["lr"]) / scale, group["eps"] * scale, group["weight_decay"] * scale


def _adamw_coefficients(group: Mapping[str, Any], step: int) -> Coefficients:
    (lr, eps, weight_decay), (beta1, beta2) = unit_adamw(group), group["betas"]
    beta2_hi = struct.unpack("f", struct.pack("f", beta2))[0]
    return (
        _sign(group),
        lr * weight_decay,
        lr / (1 - beta1**step),
        beta1,
        1 - beta1,
        beta2_hi,
        beta2 - beta2_hi,
        1 - beta2,
        1 / math.sqrt(1 - beta2**step),
        eps,
    )


def _adamw(x: Tensor, g: Tensor, moments: Moments, c: tuple[Tensor, ...]) -> tuple[Tensor, Moments]:
    m, v, denominator = _adamw_moments(g, moments, c)
    return x - (c[1] * x + c[2] * m / denominator), (m, v)


def _adamw_moments(g: Tensor, moments: Moments, c: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The new m and v, and sqrt(v) with bias correction plus eps."""
    sign, _, _, beta1, one_minus_beta1, beta2, beta2_lo, one_minus_beta2, inv_sqrt_correction, eps = c
    g = g * sign
    m = moments[0] * beta1 + g * one_minus_beta1
    v = moments[1] * beta2 + (moments[1] * beta2_lo + g * g * one_minus_beta2)
    return m, v, torch.sqrt(v) * inv_sqrt_correction + eps


def largest_ratio(betas: tuple[float, float]) -> float:
    """Bound on |m| / sqrt(v) of AdamW after any gradients: 7.27 for betas of 0.9 and 0.999; Inf if beta1² >= beta2.

    m and v weight g and g² by (1 - beta) beta^i, so by Cauchy and Schwarz m² <= v · sum (1 - beta1)² beta1^2i / ((1 -
    beta2) beta2^i).
    """
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def ratio_scale(group: Mapping[str, Any], step: int) -> tuple[float, float]:
    """(bound, eps') with which a step stores m: |m| <= bound · sqrt(v), and eps' is eps without bias correction.

    `group["ratio_scale"]` is that of the last step, with other betas and eps if a schedule changes them. With the bound
    B for the last m and v, the new one is B' with B'² = beta1² / beta2 · B² + (1 - beta1)² / (1 - beta2), again by
    Cauchy and Schwarz. Without a last step, or for old states, B is the bound for constant betas, a fixed point.
    """
    beta1, beta2 = group["betas"]
    last, _ = group.get("ratio_scale", (0.0, 0.0))
    bound = math.hypot(beta1 / math.sqrt(beta2) * last, (1 - beta1) / math.sqrt(1 - beta2))
    return bound if last else largest_ratio((beta1, beta2)), unit_adamw(group)[1] * math.sqrt(1 - beta2**step)


def _ratio_coefficients(group: Mapping[str, Any], step: int) -> Coefficients:
    last = group.get("ratio_scale", (0.0, 0.0))
    return (
        *_adamw_coefficients(group, step),
        *(last if last[0] else ratio_scale(group, step - 1)),
        ratio_scale(group, step)[0],
    )


def _adamw_ratio(x: Tensor, g: Tensor, moments: Moments, c: tuple[Tensor, ...]) -> tuple[Tensor, Moments]:
    """AdamW with m as a part of its bound, so that it needs no scale: m = ratio · bound · (sqrt(v) + eps').

    eps' is eps without bias correction, so that the new ratio is in proportion to the step and needs no other division.
    """
    *adamw, last_bound, last_eps, bound = c
    m = moments[0] * (last_bound * (torch.sqrt(moments[1]) + last_eps))
    m, v, denominator = _adamw_moments(g, (m, moments[1]), tuple(adamw))
    quotient = m / denominator
    return x - (c[1] * x + c[2] * quotient), (quotient * (c[8] / bound), v)


def _eco_coefficients(group: Mapping[str, Any], step: int) -> Coefficients:
    adamw = _adamw_coefficients(group, step)
    step_size, beta1 = adamw[2:4]
    return *adamw, (1 - 1 / beta1) / step_size if beta1 and step_size else 0.0


def _eco_gain(moments: Moments, c: tuple[Tensor, ...]) -> Tensor:
    """(1 - 1 / beta1) / (the weight's own step size): ECO, arXiv 2601.22101.

    Derived here: an error added with this factor makes the k-th later step return beta1^(k-1) (1 - beta1) of it, and
    all steps together the whole, if the step size stays.
    """
    return (torch.sqrt(moments[1]) * c[8] + c[9]) * c[10]


def _sgd_coefficients(group: Mapping[str, Any], step: int) -> Coefficients:
    # The first buffer of torch.optim.SGD is the gradient itself, for any dampening, and without momentum every one.
    dampening = group["dampening"] if step > 1 and group["momentum"] else 0.0
    return (
        _sign(group),
        group["weight_decay"],
        float(group["lr"]),
        group["momentum"],
        1 - dampening,
        1.0 if group["nesterov"] else 0.0,
    )


def _sgd(x: Tensor, g: Tensor, moments: Moments, c: tuple[Tensor, ...]) -> tuple[Tensor, Moments]:
    sign, weight_decay, lr, momentum, one_minus_dampening, nesterov = c
    g = g * sign + x * weight_decay
    m = moments[0] * momentum + g * one_minus_dampening
    direction = nesterov * (g + momentum * m) + (1 - nesterov) * m
    return x - lr * direction, (m,)


def _lion_coefficients(group: Mapping[str, Any], step: int) -> Coefficients:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return _sign(group), lr * group["weight_decay"], lr, beta1, 1 - beta1, beta2, 1 - beta2


def _lion(x: Tensor, g: Tensor, moments: Moments, c: tuple[Tensor, ...]) -> tuple[Tensor, Moments]:
    sign, decay, lr, beta1, one_minus_beta1, beta2, one_minus_beta2 = c
    g = g * sign
    direction = torch.sign(moments[0] * beta1 + g * one_minus_beta1)
    return x - (decay * x + lr * direction), (moments[0] * beta2 + g * one_minus_beta2,)


_ADAMW = UpdateRule(
    name="adamw",
    moments=("exp_avg", "exp_avg_sq"),
    decays=lambda group: group["betas"],
    coefficients=_adamw_coefficients,
    update=_adamw,
)
_RATIO = replace(
    _ADAMW,
    name="adamw-ratio",
    moments=("exp_avg_ratio", "exp_avg_sq"),
    coefficients=_ratio_coefficients,
    update=_adamw_ratio,
)
_ECO = replace(
    _ADAMW,
    name="adamw-eco",
    coefficients=_eco_coefficients,
    update=lambda x, g, moments, c: _adamw(x, g, moments, c[:-1]),
    gain=_eco_gain,
)
_SGD = UpdateRule(
    name="sgd",
    moments=("momentum_buffer",),
    decays=lambda group: (group["momentum"],),
    coefficients=_sgd_coefficients,
    update=_sgd,
)
_LION = UpdateRule(
    name="lion",
    moments=("exp_avg",),
    decays=lambda group: (group["betas"][1],),
    coefficients=_lion_coefficients,
    update=_lion,
)
RULES: dict[str, UpdateRule] = {r.name: r for r in (_ADAMW, _RATIO, _ECO, _SGD, _LION)}
