"""Norms. Layer norm: ε/s² instead of ε makes it exact on the data alone (unit scaling §3.1, rule 5).

Scalify C.2 drops ε instead, which changes the function; this is the exact form.
"""

import math
from typing import Any

import torch

from lpconv.scaled.pair import Call, Rule, Scaled, data_of, pair, value, widen_16_bit
from lpconv.scaled.rules.multiply import contraction_factor
from lpconv.scaled.scales import Scale, larger_scale, multiply, ratio, times

aten = torch.ops.aten

SAFE = 2.0**40  # ε/s² must stay a normal fp32 number for any usual ε


def _on_data(x: Any, eps: float) -> tuple[Any, float, Scale]:
    """(data, ε, scale) to normalise: the data with ε/s² while s is static and moderate, otherwise the value."""
    data, scale = pair(x)
    if isinstance(scale, float) and 1 / SAFE <= scale <= SAFE:
        return data, eps / scale**2, scale
    return value(x).to(data.dtype), eps, 1.0


def _layer_norm(call: Call, x: Any, shape: list[int], weight: Any, bias: Any, eps: float) -> Any:
    """(norm(d_x; ε/s_x²)·d_w + d_b, max(s_w, s_b)) with mean at s_x and 1/σ at 1/s_x, in at least fp32."""
    data, data_eps, scale_x = _on_data(x, eps)
    scale: Scale = 0.0
    for a in (weight, bias):
        scale = scale if a is None else larger_scale(scale, pair(a)[1])
    scale = 1.0 if isinstance(scale, float) and scale == 0 else scale
    affine = [None if a is None else widen_16_bit(times(pair(a)[0], ratio(pair(a)[1], scale))) for a in (weight, bias)]
    out, mean, rstd = call.op(widen_16_bit(data), shape, *affine, data_eps)
    return Scaled(out.to(data.dtype), scale), Scaled(mean, scale_x), Scaled(rstd, ratio(1.0, scale_x))


def _layer_norm_backward(
    call: Call, grad: Any, x: Any, shape: list[int], mean: Any, rstd: Any, weight: Any, bias: Any, mask: list[bool]
) -> tuple[Scaled | None, ...]:
    """Linear in g: the input's gradient at s_g·s_w/s_x, the weight's and bias's at s_g·r for r = 2^⌊log2 √rows⌋."""
    data_g, scale_g = pair(grad)
    scale_x, scale_w = pair(mean)[1], 1.0 if weight is None else pair(weight)[1]
    data_x, own_scale = pair(x)
    if not (isinstance(own_scale, float) and own_scale == scale_x):  # the forward pass normalised the value
        data_x = value(x)
    rows = data_g.numel() // max(1, math.prod(shape))
    wide = [widen_16_bit(data_of(a)) for a in (data_g, data_x, mean, rstd, weight, bias)]
    grads = call.op(*wide[:2], shape, *wide[2:], mask)
    r = contraction_factor(call, rows)
    scales = (ratio(multiply(scale_g, scale_w), scale_x), multiply(scale_g, r), multiply(scale_g, r))
    return tuple(
        None if g is None else Scaled(times(g, f).to(data_g.dtype), s)
        for g, f, s in zip(grads, (1.0, 1 / r, 1 / r), scales, strict=True)
    )


def _batch_norm(call: Call, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """(norm of the values, 1): running means are values, so adapting ε cannot make it exact on the data."""
    out, *statistics = call.op(value(x), *(widen_16_bit(value(a)) for a in (weight, bias)), *args)
    return (Scaled(out.to(data_of(x).dtype), 1.0), *statistics)


OPS: dict[Rule, tuple[Any, ...]] = {
    _batch_norm: (
        aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    ),
    _layer_norm: (aten.native_layer_norm.default,),
    _layer_norm_backward: (aten.native_layer_norm_backward.default,),
}  # fmt: skip
