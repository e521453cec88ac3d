"""Backward ops: all are linear in the incoming gradient, so f(g_d·s, …) = s·f(g_d, …) holds exactly for each."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpconv.formats.scale import pow2_floor
from lpconv.scaled.pair import Call, Role, Rule, Scaled, data_of, pair, value, widen_16_bit
from lpconv.scaled.rules.nonlinear import AttentionInputs, plain_operands
from lpconv.scaled.rules.own import rebalance_pair
from lpconv.scaled.scales import MIN_SCALE, Scale, multiply, ratio, times

aten = torch.ops.aten


def linear(call: Call, grad: Any, *args: Any, **kwargs: Any) -> Any:
    """(f(d_g, values of the rest), s_g), computed in at least fp32.

    Further results, which are parameter gradients and sums over the batch, stay in fp32. NotImplemented if another
    operand than the first is a gradient.
    """
    if any(isinstance(a, Scaled) and a.role is Role.GRADIENT for a in args):
        return NotImplemented
    data, scale = pair(grad)
    rest = [widen_16_bit(value(a)) for a in args]
    out = call.op(widen_16_bit(data), *rest, **{k: value(v) for k, v in kwargs.items()})
    if isinstance(out, Tensor):
        return Scaled(out.to(data.dtype), scale)
    first, *others = out
    grads = (first if first is None else first.to(data.dtype), *others)
    return tuple(None if g is None else Scaled(g, scale) for g in grads)


def threshold(call: Call, grad: Any, x: Any, threshold: float) -> Any:
    """relu's gradient: it depends on the sign of x only, so no value is needed."""
    if threshold != 0:
        return linear(call, grad, x, threshold)
    data, scale = pair(grad)
    return Scaled(call.op(data, data_of(x), 0), scale)


def softmax(call: Call, grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    """(c·f(d_g, P), s_g/c) with P's own gain c: elements of P·(g - Σ P·g) are as small as those of P.

    With `softmax_grad` c brings the result near 1: a trained P is far from the uniform one of the theory.
    """
    (data, scale), (_, scale_p) = pair(grad), pair(output)
    out = call.op(widen_16_bit(data), widen_16_bit(value(output)), dim, torch.promote_types(data.dtype, torch.float32))
    if call.numerics.softmax_grad:
        near_1 = rebalance_pair(Scaled(out, scale), "l2", smallest=MIN_SCALE, headroom=call.numerics.headroom)
        return near_1.with_data(near_1.data.to(dtype))
    gain = 1 / scale_p if isinstance(scale_p, float) and scale_p else 1.0
    return Scaled(times(out, gain).to(dtype), multiply(scale, 1 / gain))


def _log_softmax(call: Call, grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    """(g - softmax·Σg, s_g), cast to the dtype of the logits at the end."""
    data, scale = pair(grad)
    wide = torch.promote_types(data.dtype, torch.float32)
    return Scaled(call.op(data.to(wide), value(output).to(wide), dim, wide).to(dtype), scale)


def _nll_loss(call: Call, grad: Any, logp: Any, target: Tensor, weight: Any, reduction: int, *args: Any) -> Any:
    """(f(k·d_g), s_g/k): under mean reduction 1/rows is a constant and belongs in the scale, and so does 1/√V.

    One element in V is not zero, so its RMS is √V times smaller; the RMS of softmax - onehot, which the next op
    computes from it, is √(V-1)/V [unit scaling table A.2]. k = 2^⌊log2 rows⌋·2^⌊log2 √V⌋ multiplies the gradient of the
    loss: one number, no pass. Under native unit scaling, k = rows·V/√(V-1).
    """
    (data, scale), log_probabilities = pair(grad), value(logp)
    num_classes = log_probabilities.shape[1 if log_probabilities.dim() > 1 else 0]
    rows = max(1, target.numel()) if reduction == 1 else 1
    gain = 1.0
    if call.numerics.native:
        gain = num_classes / math.sqrt(max(1, num_classes - 1)) * rows
    elif call.numerics.unit_factors:
        gain = pow2_floor(num_classes**0.5) * pow2_floor(float(rows))
    at_gain = times(data.to(log_probabilities.dtype), gain)
    weight = None if weight is None else value(weight).to(log_probabilities.dtype)
    return Scaled(call.op(at_gain, log_probabilities, target, weight, reduction, *args), ratio(scale, gain))


def _mean_squared(call: Call, grad: Any, x: Any, target: Any, reduction: int) -> Any:
    """(f(n·d_g, …), s_g/n), n = 2^⌊log2 elements⌋ under mean reduction."""
    (data, scale), x_value = pair(grad), value(x)
    count = pow2_floor(float(max(1, x_value.numel())))
    gain = count if reduction == 1 and call.numerics.unit_factors else 1.0
    out = call.op(times(widen_16_bit(data), gain), x_value, value(target), reduction)
    return Scaled(out, multiply(scale, 1 / gain))


def attention_backward(
    call: Call, grad: Any, query: Any, key: Any, v: Any, out: Any, *args: Any, scale: float | None = None, **kwargs: Any
) -> Any:
    """Gradients of Q, K and V, at the scales s_g·s_v/s_q, s_g·s_v/s_k and s_g."""
    rest, named = plain_operands(query, args, kwargs)
    operands = _attention_operands(grad, query, key, v, out, scale)
    return operands.scaled(call.op(*operands.tensors, *rest, **named, scale=operands.softmax_scale))


def efficient_attention_backward(
    call: Call, grad: Any, query: Any, key: Any, v: Any, bias: Any, out: Any, *args: Any, scale: float | None = None
) -> Any:
    """`attention_backward` for a kernel with a bias before the output, whose gradient has the scale s_g·s_v."""
    (bias, *rest), _ = plain_operands(query, (bias, *args), {})
    operands = _attention_operands(grad, query, key, v, out, scale)
    *before, at_v = operands.tensors
    return operands.scaled(call.op(*before, bias, at_v, *rest, scale=operands.softmax_scale))


class _AttentionOperands(NamedTuple):
    """Operands of an attention kernel's backward pass, and the scales of the gradients of Q, K, V and a bias."""

    tensors: tuple[Tensor, ...]
    softmax_scale: float
    scales: tuple[Scale, ...]

    def scaled(self, grads: tuple[Tensor | None, ...]) -> tuple[Scaled | None, ...]:
        return tuple(None if g is None else Scaled(g, s) for g, s in zip(grads, self.scales, strict=False))


def _attention_operands(
    grad: Any, query: Any, key: Any, v: Any, out: Any, softmax_scale: float | None
) -> _AttentionOperands:
    (data_g, scale_g), (data_v, scale_v), (data_out, scale_out) = pair(grad), pair(v), pair(out)
    inputs = AttentionInputs.of(query, key, softmax_scale)
    at_v = data_out if scale_out is scale_v else times(data_out, ratio(scale_out, scale_v))
    scale_gv = multiply(scale_g, scale_v)
    return _AttentionOperands(
        tensors=(data_g, inputs.query, inputs.key, data_v, at_v),
        softmax_scale=inputs.softmax_scale,
        scales=(ratio(scale_gv, inputs.query_scale), ratio(scale_gv, inputs.key_scale), scale_g, scale_gv),
    )


def _solve(call: Call, triangle: Any, x: Any, **kwargs: Any) -> Any:
    """(A^-1·d, s): linear in the right-hand side, in the forward and the backward pass."""
    data, scale = pair(x)
    wide = widen_16_bit(data)
    return Scaled(call.op(value(triangle).to(wide.dtype), wide, **kwargs).to(data.dtype), scale)


OPS: dict[Rule, tuple[Any, ...]] = {
    _solve: (aten.linalg_solve_triangular.default,),
    threshold: (aten.threshold_backward.default,),
    softmax: (aten._softmax_backward_data.default,),
    _log_softmax: (aten._log_softmax_backward_data.default,),
    _nll_loss: (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default),
    _mean_squared: (aten.mse_loss_backward.default,),
    attention_backward: (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    ),
    efficient_attention_backward: (aten._scaled_dot_product_efficient_attention_backward.default,),
    linear: (
        aten.gelu_backward.default, aten.silu_backward.default, aten.mish_backward.default,
        aten.hardswish_backward.default, aten.elu_backward.default, aten.leaky_relu_backward.default,
        aten.tanh_backward.default, aten.sigmoid_backward.default, aten.softplus_backward.default,
        aten.embedding_dense_backward.default, aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default,
        aten.upsample_bicubic2d_backward.default, aten.upsample_bilinear2d_backward.default,
    ),
}  # fmt: skip
