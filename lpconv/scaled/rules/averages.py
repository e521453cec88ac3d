"""Native unit scaling of averages: softmax and attention, whose sizes depend on the number of keys."""

import math
from typing import Any

import torch

from lpconv.errors import UnsupportedError
from lpconv.scaled.pair import Call, Rule, Scaled, move_factor, pair, value
from lpconv.scaled.rules import linear, nonlinear
from lpconv.scaled.scales import times

aten = torch.ops.aten

LARGEST_SCORE = 4.0  # largest predicted size of softmax's input; above, it starts nearly one-hot
MAX_GAIN = nonlinear.SOFTMAX_MAX_GAIN


def averaged_size(num_keys: int, is_causal: bool, size: float = 1.0) -> float:
    """The predicted size of attention's output relative to V, for normally distributed scores of this size.

    A row of n keys has weights e^z/Σe^z, whose squares sum to E[e^2z]/(n·E[e^z]²) = c/n for c = e^(size²); the mean
    over the rows of a causal square of S is c·(1 + ln(S/c))/S. At most 1. unit-scaling 0.3.5 has c = 1 and ln S. With
    large scores the largest of n dominates: c is n^0.7 at most, found by simulation for sizes 2 to 4 and n up to 512.
    """
    c = min(math.exp(min(size, LARGEST_SCORE) ** 2), num_keys**0.7)
    return math.sqrt(min(1.0, c * (1 + math.log(num_keys / c) if is_causal and num_keys > c else 1.0) / num_keys))


def _choice_size(num_keys: int, is_causal: bool) -> float:
    """Predicted size of the gradients of Q and K relative to `averaged_size`.

    It is below 1 for causal attention, because the first rows have too few keys to choose from.
    """
    return math.sqrt(math.log(num_keys / math.e) / math.log(num_keys)) if is_causal and num_keys > 2 * math.e else 1.0


def averaged_size_alike(num_keys: int, is_causal: bool, size: float = 1.0) -> float:
    """The geometric mean of `averaged_size` (independent values) and 1 (equal values or one-hot scores).

    The common part of all tokens passes an average undiminished: biases and activations with a non-zero mean add to it.
    Only differences affect gradients, so these follow the theory without this correction.
    """
    return math.sqrt(averaged_size(num_keys, is_causal, size))


def _softmax(call: Call, x: Any, dim: int, *args: Any) -> Any:
    """(c·softmax(d·s), 1/c), c = √S over the predicted size of S keys' average, at most 2^8: elements have size 1.

    Raises `UnsupportedError` for scores whose predicted size is far from 1: attention without its 1/√d.
    """
    if not isinstance(x, Scaled):
        return NotImplemented
    if isinstance(x.scale, float) and x.scale > LARGEST_SCORE:
        raise UnsupportedError(
            f"method native has no rule for {call.op} over scores of size {x.scale:.3g}: it would start one-hot",
            hint="train this architecture with method unit: its attention lacks the factor 1/√d",
        )
    out = call.op(value(x), dim, *args)
    num_keys = out.shape[dim]
    size = x.scale if isinstance(x.scale, float) else 1.0
    gain = min(math.sqrt(num_keys) / averaged_size(num_keys, call.numerics.causal, size), MAX_GAIN)
    return Scaled(times(out, gain).to(x.data.dtype), 1 / gain)


def _softmax_backward(call: Call, grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    """(c·f(d_g, P)/`_choice_size`, …) with P's own gain c."""
    out = linear.softmax(call, grad, output, dim, dtype)
    return move_factor(out, 1 / _choice_size(pair(output)[0].shape[dim], call.numerics.causal))


def _attention(call: Call, query: Any, key: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """(c·sdpa(d_q, d_k, d_v), s_v/c), c = 1/`averaged_size_alike`."""
    out, *others = nonlinear.attention(call, query, key, v, *args, **kwargs)
    return (move_factor(out, 1 / averaged_size_alike(*_keys(call, (query, key, v, *args), kwargs))), *others)


def _attention_backward(rule: Rule) -> Rule:
    """Multiply the gradients of attention by factors that bring them to unit size.

    The factor of V is 1/`averaged_size`, since each of its gradients is a sum of as many equally weighted terms as the
    output. The factor of a bias is that over `_choice_size`; the factor of Q and K is also divided by the size of the
    scores, by which their gradients are multiplied.
    """

    def backward(call: Call, *args: Any, **kwargs: Any) -> Any:
        num_keys, is_causal, size = _keys(call, args, kwargs)
        at_v = 1 / averaged_size(num_keys, is_causal, size)
        at_bias = at_v / _choice_size(num_keys, is_causal)
        grads = rule(call, *args, **kwargs)
        shared = math.sqrt(grads[2].data.shape[1] / grads[0].data.shape[1])  # a head of K and V for several of Q
        factors = (at_bias / size, at_bias / size * shared, at_v * shared, at_bias)
        return tuple(move_factor(g, f) if isinstance(g, Scaled) else g for g, f in zip(grads, factors, strict=False))

    return backward


def _keys(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool, float]:
    """The number of keys that attention averages over, whether it is causal, and the scores' size."""
    named = dict(zip((a.name for a in call.op._schema.arguments), args, strict=False)) | kwargs
    query, key = named["query"], named["key"]
    (num_queries, width), num_keys = pair(query)[0].shape[-2:], pair(key)[0].shape[-2]
    size = nonlinear.AttentionInputs.of(query, key, named.get("scale")).softmax_scale * math.sqrt(width)
    hides = any(named.get(n) is not None for n in ("attn_mask", "attn_bias"))
    is_causal = bool(named.get("is_causal")) or (hides and call.numerics.causal)
    return num_keys, is_causal and num_queries == num_keys, size


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten._softmax.default, aten._safe_softmax.default), _softmax),
    aten._softmax_backward_data.default: _softmax_backward,
    **{op: _attention for op, rule in nonlinear.RULES.items() if rule is nonlinear.attention},
    **{
        op: _attention_backward(rule)
        for op, rule in linear.RULES.items()
        if rule in (linear.attention_backward, linear.efficient_attention_backward)
    },
}
