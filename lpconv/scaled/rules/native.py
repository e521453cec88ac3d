"""Native unit scaling: rules under which every scale is the size that theory predicts at initialisation.

The ordinary rules keep scales powers of two, rounding each factor down, and leave sizes that depend on the shape of a
function (an activation's, attention's) in the data. Here a scale is the predicted root mean square of the value, so
that a fresh model's data and gradients have unit size (Blake et al. 2023, table A.2; the letters α for forward and β
for backward factors are the paper's). Values are unchanged: data · scale is the same function as before.

Backward factors need no constraint here. The paper must tie the factors of edges that are not cut-edges, or gradients
would change direction; a gradient that carries its scale is the true one for any factor (docs/methods/native.md).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lpconv.scaled.rules.layout as layout
import lpconv.scaled.rules.linear as linear
import lpconv.scaled.rules.nonlinear as nonlinear
from lpconv.errors import UnsupportedError
from lpconv.scaled.operands import product
from lpconv.scaled.pair import Call, Rule, Scaled, move_factor, pair, value
from lpconv.scaled.rules.add import at_scale
from lpconv.scaled.rules.multiply import contraction_factor
from lpconv.scaled.scales import Scale, multiply, ratio, static, times

aten = torch.ops.aten

LARGEST_SCORE = 4.0  # largest predicted size of softmax's input; above, it starts nearly one-hot
# 1/σ of f(z) and 1/RMS of f'(z) for z of unit normal distribution; relu, gelu, tanh and sigmoid are in table A.2. For
# sigmoid it is 1/RMS of f(z), while the paper has 1/σ = 4.80: a gate also multiplies by its mean of ½.
ACTIVATIONS: dict[str, tuple[float, float]] = {
    "relu": (1.7129, 1.4142),
    "leaky_relu": (1.7048, 1.4142),
    "gelu": (1.7009, 1.4811),
    "silu": (1.7872, 1.6233),
    "mish": (1.5920, 1.4448),
    "hardswish": (1.8139, 1.6701),
    "elu": (1.2708, 1.2234),
    "softplus": (1.9191, 1.8462),
    "tanh": (1.5925, 1.4674),
    "sigmoid": (1.8460, 4.7226),
}


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


def _softmax(call: Call, x: Scaled, dim: int, *args: Any) -> Scaled:
    """(c·softmax(d·s), 1/c), c = √S over the predicted size of S keys' average, at most 2^8: elements have size 1.

    Raises `UnsupportedError` for scores whose predicted size is far from 1: attention without its 1/√d.
    """
    if isinstance(x.scale, float) and x.scale > LARGEST_SCORE:
        raise UnsupportedError(
            f"method native has no rule for {call.op} over scores of size {x.scale:.3g}: it would start one-hot",
            hint="train this architecture with method unit: its attention lacks the factor 1/√d",
        )
    out = call.op(value(x), dim, *args)
    num_keys = nonlinear.num_keys(out, dim)
    size = x.scale if isinstance(x.scale, float) else 1.0
    gain = min(math.sqrt(num_keys) / averaged_size(num_keys, call.numerics.causal, size), nonlinear.SOFTMAX_MAX_GAIN)
    return Scaled(times(out, gain).to(x.data.dtype), 1 / gain)


def _softmax_backward(call: Call, grad: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    """(c·f(d_g, P)/`_choice_size`, …) with P's own gain c."""
    out = linear.softmax(call, grad, output, dim, dtype)
    return move_factor(out, 1 / _choice_size(nonlinear.num_keys(pair(output)[0], dim), call.numerics.causal))


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


def _number(x: Any) -> tuple[Any, Scale]:
    """(data, scale) like `pair`, but a number becomes its sign and its magnitude."""
    if isinstance(x, (Scaled, Tensor, complex)):
        return pair(x)
    return (math.copysign(1.0, x), abs(float(x))) if x and math.isfinite(x) else (float(x), 1.0)


def _add(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Any:
    """(d_a·s_a/s + alpha·d_b·s_b/s, s), s = √(s_a² + s_b²): a weighted add with the model's own sizes.

    In a residual stream s_a² grows with every branch of size s_b, which is the paper's running mean τ = s_b²/s². Adding
    a plain tensor, such as a mask, keeps the scale, and so does adding a vector of parameters: a bias starts at zero.
    For the weight w of a norm, 1 + w has the scale of w.
    """
    (data_a, scale_a), (data_b, scale_b) = _number(a), _number(b)
    data_b, scale_b = data_b * math.copysign(1.0, alpha), multiply(scale_b, abs(float(alpha)))
    if _is_size_of_sum(a, b):
        scale = scale_a
    elif _is_size_of_sum(b, a):
        scale = scale_b
    else:
        scale = math.hypot(static(scale_a), static(scale_b))
    return Scaled(at_scale(data_a, scale_a, scale) + at_scale(data_b, scale_b, scale), scale or 1.0)


def _is_size_of_sum(x: Any, other: Any) -> bool:
    """Whether `other` does not increase the size of `x`."""
    if not isinstance(x, Scaled) or not isinstance(other, Scaled):
        return isinstance(other, Tensor) or (isinstance(x, Scaled) and _is_vector(x))
    return _is_vector(other) and x.data.dim() > 1


def _is_vector(x: Scaled) -> bool:
    return x.role.is_stored and x.data.dim() == 1


def _sub(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Any:
    """`_add` with b negated; subtracting a statistic of a, such as its mean, keeps the scale of a."""
    if isinstance(a, Scaled) and isinstance(b, Scaled) and b.data.numel() < a.data.numel():
        return Scaled(a.data - at_scale(b.data, multiply(b.scale, float(alpha)), a.scale), a.scale)
    return _add(call, a, b, alpha=-alpha)


def _rsub(call: Call, a: Any, b: Any, alpha: float = 1) -> Any:
    """b - alpha·a. For a number b, s = max(|b - alpha·s_a|, alpha·s_a): 1 - gate is as large as a gate of size ½.

    √(b² + s_a²), for numbers of both signs, would be twice the size, again at every step of a recurrence.
    """
    if isinstance(a, Scaled) and isinstance(b, (int, float)) and alpha == 1:
        size = static(a.scale)
        scale = max(abs(b - size), size) or 1.0
        return Scaled(b / scale - a.data * (size / scale), scale)
    return _add(call, b, a, alpha=-alpha)


def _mul(call: Call, a: Any, b: Any) -> Scaled:
    """(d_a·d_b, s_a·s_b); a number's magnitude moves into the scale, and a plain tensor has the size of a cosine.

    Plain tensors with several axes that multiply scaled ones are rotary position tables; x·cos + x'·sin keeps its size.
    """
    (data_a, scale_a), (data_b, scale_b) = (_position_table(*x) for x in ((a, b), (b, a)))
    if isinstance(data_a, float) or isinstance(data_b, float):
        data = at_scale(data_b, data_a, 1.0) if isinstance(data_a, float) else at_scale(data_a, data_b, 1.0)
        return Scaled(data, multiply(scale_a, scale_b))
    return Scaled(data_a * data_b, multiply(scale_a, scale_b))


def _position_table(x: Any, other: Any) -> tuple[Any, Scale]:
    """Treat a plain tensor as a table of rotary positions, with the size of a cosine, unless it is a mask.

    Masks have rows of one feature, or the shape of the other operand (dropout).
    """
    if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] > 1 and x.shape != other.data.shape:
        return x * math.sqrt(2), math.sqrt(0.5)
    return _number(x)


def _div(call: Call, a: Any, b: Any) -> Scaled:
    """(d_a/d_b, s_a/s_b); a number's magnitude moves into the scale."""
    (data_a, scale_a), (data_b, scale_b) = _number(a), _number(b)
    return Scaled(data_a / data_b, ratio(scale_a, scale_b))


def _power(call: Call, x: Scaled, exponent: Any) -> Any:
    """(d^y, s^y) for every number y."""
    if not isinstance(exponent, (int, float)):
        return NotImplemented
    return Scaled(torch.pow(x.data, exponent), static(x.scale) ** exponent)


def _root(call: Call, x: Scaled) -> Scaled:
    """sqrt and rsqrt of data and scale."""
    root = math.sqrt(static(x.scale))
    return Scaled(call.op(x.data), root if call.op is aten.sqrt.default else ratio(1.0, root))


def _add_matmul(call: Call, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Scaled:
    """addmm and baddbmm at the scale of the product: a bias is zero at initialisation."""
    (data_bias, scale_bias), r = _number(bias), contraction_factor(call, pair(a)[0].shape[-1])
    scale = multiply(multiply(multiply(pair(a)[1], pair(b)[1]), r), abs(float(alpha)))
    at_scale = times(data_bias, float(beta) * float(ratio(scale_bias, scale)))
    return Scaled(product(call.numerics, a, b, alpha=math.copysign(1 / r, alpha), bias=at_scale), scale)


def _with_factor(rule: Rule, factor: float | Callable[..., float]) -> Rule:
    """`rule` with its data multiplied by `factor`, or by `factor(args)`, and its scale divided by it."""

    def at_unit(call: Call, *args: Any, **kwargs: Any) -> Any:
        out = rule(call, *args, **kwargs)
        if out is NotImplemented:
            return out
        first, rest = (out[0], out[1:]) if isinstance(out, tuple) and not isinstance(out, Scaled) else (out, None)
        at_one = move_factor(first, factor if isinstance(factor, float) else factor(*args))
        return at_one if rest is None else (at_one, *rest)

    return at_unit


def _cat(call: Call, pieces: list[Any], *args: Any) -> Scaled:
    """cat and stack at s = √(Σ n_i·s_i²/Σ n_i), the size of the result; n_i elements in each piece."""
    pairs = [pair(p) for p in pieces]
    squares = sum(data.numel() * static(scale) ** 2 for data, scale in pairs)
    size = math.sqrt(squares / max(1, sum(data.numel() for data, _ in pairs)))
    return Scaled(call.op([at_scale(data, scale, size) for data, scale in pairs], *args), size)


def _scatter(call: Call, base: Any, *args: Any, **kwargs: Any) -> Scaled:
    """n values among the N of a base, as in gradients of indexing: s = √(s_base² + s_values²·n/N)."""
    at = 1 if call.op is aten.index_put.default else 2
    (data, scale_base), (values, scale_values) = pair(base), pair(args[at])
    scale = math.hypot(static(scale_base), static(scale_values) * math.sqrt(values.numel() / max(1, data.numel())))
    rest = (*args[:at], at_scale(values, scale_values, scale), *args[at + 1 :])
    return Scaled(call.op(at_scale(data, scale_base, scale), *rest, **kwargs), scale)


def _among_zeros(grad: Scaled, sizes: list[int], *_: Any) -> float:
    """√(N/n) for a gradient of n elements that is padded with zeros to N."""
    return math.sqrt(math.prod(sizes) / max(1, grad.data.numel()))


def _rows_per_use(grad: Any, ids: Any, num_weights: int, *_: Any) -> float:
    """√(V/b) for b looked-up rows of V: a row of the table's gradient sums b/V rows on average."""
    return math.sqrt(num_weights / max(1, ids.numel()))


def _dropout_factor(x: Any, p: float, *_: Any) -> float:
    """√(1-p): after dropout, a unit tensor has size 1/√(1-p)."""
    return math.sqrt(1 - p) if p < 1 else 1.0


_FORWARD = {
    **dict.fromkeys(("relu", "leaky_relu"), layout.layout),
    **dict.fromkeys(("gelu", "silu", "mish", "hardswish", "elu"), nonlinear.activation),
    **dict.fromkeys(("softplus", "tanh", "sigmoid"), nonlinear.unit),
}

RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _add),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sub),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _rsub),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _mul),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _div),
    aten.pow.Tensor_Scalar: _power,
    **dict.fromkeys((aten.sqrt.default, aten.rsqrt.default), _root),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _add_matmul),
    **dict.fromkeys((aten._softmax.default, aten._safe_softmax.default), _softmax),
    aten._softmax_backward_data.default: _softmax_backward,
    **dict.fromkeys(nonlinear.OPS[nonlinear.attention], _attention),
    **{
        op: _attention_backward(rule)
        for rule in (linear.attention_backward, linear.efficient_attention_backward)
        for op in linear.OPS[rule]
    },
    **dict.fromkeys((aten.cat.default, aten.stack.default), _cat),
    **dict.fromkeys(
        (aten.slice_backward.default, aten.select_backward.default, aten.diagonal_backward.default),
        _with_factor(layout.layout, _among_zeros),
    ),
    **dict.fromkeys((aten.index_put.default, aten.scatter_add.default, aten.index_add.default), _scatter),
    aten.embedding_dense_backward.default: _with_factor(linear.linear, _rows_per_use),
    aten.native_dropout.default: _with_factor(layout.with_indices, _dropout_factor),
    aten.native_dropout_backward.default: _with_factor(layout.layout, lambda grad, mask, scale: 1 / math.sqrt(scale)),
    **{
        getattr(aten, name).default: _with_factor(rule, ACTIVATIONS[name][0])
        for name, rule in _FORWARD.items()
    },
    aten.threshold_backward.default: _with_factor(linear.threshold, ACTIVATIONS["relu"][1]),
    **{
        getattr(aten, f"{name}_backward").default: _with_factor(linear.linear, ACTIVATIONS[name][1])
        for name in _FORWARD if name != "relu"
    },
}  # fmt: skip
