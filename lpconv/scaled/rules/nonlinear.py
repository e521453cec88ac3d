"""Functions that need the value: dequantise in fp32, apply, and give the result a static scale."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpconv.formats.scale import pow2_floor
from lpconv.scaled.pair import Call, Role, Rule, Scaled, data_of, pair, value, with_nonzero_scale
from lpconv.scaled.scales import ratio, times

aten = torch.ops.aten

SOFTMAX_MAX_GAIN = 2.0**8  # one-hot rows reach 1·gain, which must stay below 448, the top of e4m3fn


def unit(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Scaled:
    """(f(d·s), 1): functions with a bounded result, or with an unpredictable scale [Scalify §1.4, exp]."""
    return Scaled(call.op(value(x), *args, **kwargs).to(x.data.dtype), 1.0)


def activation(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Scaled:
    """(f(d·s)/s, s) for f(x) = x·g(x) with 0 ≤ g ≤ 1, roughly: gelu, silu and similar keep the scale [Scalify C.1].

    The reference computes d·g(d·s); dividing f by a power of two gives the same number, with f's own rounding.
    """
    x = with_nonzero_scale(x)
    out = call.op(value(x), *args, **kwargs)
    return Scaled(times(out, ratio(1.0, x.scale)).to(x.data.dtype), x.scale)


def num_keys(scores: Tensor, dim: int) -> int:
    """The number of keys that softmax averages over, at least 1."""
    return max(1, scores.shape[dim]) if scores.dim() else 1


def _softmax(call: Call, x: Scaled, dim: int, *args: Any) -> Scaled:
    """(c·softmax(d·s), 1/c), c = 2^⌊log2 S⌋ for S keys: uniform attention has data 1 [unit scaling A.2].

    c is at most 2^8, the one-hot limit of e4m3fn.
    """
    out = call.op(value(x), dim, *args)
    gain = min(float(pow2_floor(float(num_keys(out, dim)))), SOFTMAX_MAX_GAIN) if call.numerics.unit_factors else 1.0
    return Scaled(times(out, gain).to(x.data.dtype), 1 / gain)


def _log_softmax(call: Call, x: Scaled, dim: int, half_to_float: bool) -> Scaled:
    """(log_softmax(d·s), 1), exact, because the backward pass begins at the loss head.

    16-bit data, including bf16, give fp16: log-probabilities fit its range, and bf16 would be 8 times coarser.
    """
    out = aten._log_softmax.default(value(x), dim, False)
    return Scaled(out.half() if x.data.itemsize == 2 else out, 1.0, Role.EXACT)


def _of_two(call: Call, x: Any, y: Any) -> Any:
    """(f(x, y), 1) for two values, such as x^y for exponents without a valid scale."""
    return Scaled(call.op(value(x), value(y)).to(torch.result_type(data_of(x), data_of(y))), 1.0)


class AttentionInputs(NamedTuple):
    """Q, K and the softmax scale for an attention kernel, and the scales applied outside the kernel.

    Static scales go into the softmax scale, s_q·s_k/√d, so Q and K are used as they are. A kernel does not take a
    tensor there, so with a dynamic scale it gets values.
    """

    query: Tensor
    key: Tensor
    softmax_scale: float
    query_scale: float
    key_scale: float

    @classmethod
    def of(cls, query: Any, key: Any, softmax_scale: float | None) -> "AttentionInputs":
        """The kernel's inputs for pairs or plain tensors."""
        (data_q, scale_q), (data_k, scale_k) = pair(with_nonzero_scale(query)), pair(with_nonzero_scale(key))
        base = data_q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if isinstance(scale_q, float) and isinstance(scale_k, float):
            return cls(data_q, data_k, base * scale_q * scale_k, scale_q, scale_k)
        return cls(times(data_q, scale_q), times(data_k, scale_k), base, 1.0, 1.0)


def plain_operands(query: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Biases and masks of an attention kernel as values in the dtype of Q, as kernels require; others unchanged."""
    dtype = pair(query)[0].dtype

    def plain(x: Any) -> Any:
        return value(x).to(dtype) if isinstance(x, Scaled) else x

    return [plain(a) for a in args], {k: plain(v) for k, v in kwargs.items()}


def attention(call: Call, query: Any, key: Any, v: Any, *args: Any, scale: float | None = None, **kwargs: Any) -> Any:
    """(sdpa(d_q, d_k, d_v), s_v): attention is linear in V."""
    inputs, (data_v, scale_v) = AttentionInputs.of(query, key, scale), pair(v)
    rest, named = plain_operands(query, args, kwargs)
    out, *others = call.op(inputs.query, inputs.key, data_v, *rest, **named, scale=inputs.softmax_scale)
    return (Scaled(out, scale_v), *others)


OPS: dict[Rule, tuple[Any, ...]] = {
    _softmax: (aten._softmax.default, aten._safe_softmax.default),
    _log_softmax: (aten._log_softmax.default,),
    _of_two: (
        aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.xlogy.Tensor, aten.atan2.default, aten.logaddexp.default,
    ),
    attention: (
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_efficient_attention.default,
    ),
    activation: (
        aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default, aten.elu.default,
        aten.logsumexp.default,
    ),
    unit: (
        aten.tanh.default, aten.sigmoid.default, aten.softplus.default, aten.erf.default, aten.sin.default,
        aten.cos.default, aten.exp.default, aten.expm1.default, aten.log.default, aten.log1p.default,
        aten.atan.default, aten.cumprod.default,
    ),
}  # fmt: skip
