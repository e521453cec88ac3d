"""Ops whose result has no scale: comparisons, counts, new tensors, norms for reports."""

from typing import Any

import torch

from lpconv.scaled.pair import Call, Role, Rule, Scaled, data_of, value

aten = torch.ops.aten


def _on_values(call: Call, *args: Any, **kwargs: Any) -> Any:
    """op(values): comparisons and similar ops give plain booleans or integers [Scalify §1.4]."""
    return call.op(*map(value, args), **{k: value(v) for k, v in kwargs.items()})


def _compared_with(call: Call, x: Scaled, number: float) -> Any:
    """op(value, number): torch rounds the number to the dtype of the tensor first."""
    return call.op(value(x), torch.tensor(number, dtype=x.data.dtype).item())


def _on_data(call: Call, *args: Any, **kwargs: Any) -> Any:
    """op(data): argmax and isnan do not change under a positive factor; empty_like and similar need only the shape."""
    return call.op(*map(data_of, args), **kwargs)


def _classify(call: Call, x: Scaled) -> Any:
    """isnan, isinf and isfinite: on the data under a static scale, which is finite; otherwise on the value."""
    return call.op(x.data if isinstance(x.scale, float) else value(x))


def _zeros(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Scaled:
    """(op(d), 0): a zero known before the run has any scale, and so has memory that a copy will fill."""
    return Scaled(call.op(x.data, *args, **kwargs), 0.0, x.role)


def _new_zeros(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Scaled:
    """`_zeros`, or for a parameter a tensor at its own scale, because it will hold a part of the parameter."""
    zeros = _zeros(call, x, *args, **kwargs)
    return Scaled(zeros.data, x.scale, x.role) if x.role.is_stored else zeros


def _nll_loss(call: Call, logp: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """((loss, 1), total weight): the loss stays scaled, otherwise its backward pass would begin with plain tensors."""
    log_probabilities = value(logp)
    weight = None if weight is None else value(weight).to(log_probabilities.dtype)
    loss, total = call.op(log_probabilities, target, weight, reduction, ignore_index)
    return Scaled(loss, 1.0), total


def loss(call: Call, *args: Any) -> Scaled:
    """(loss of the values, 1), scaled for the same reason as in `_nll_loss`."""
    return Scaled(call.op(*map(value, args)), 1.0)


def _vector_norm(call: Call, x: Scaled, *args: Any, dtype: torch.dtype | None = None) -> Any:
    """(norm(d), s), or a plain fp32 tensor for gradients. NotImplemented for the order 0, a count."""
    if args[:1] == (0,):
        return NotImplemented
    norm = x.with_data(call.op(x.data.to(torch.promote_types(x.data.dtype, torch.float32)), *args))
    return value(norm) if x.role is Role.GRADIENT else Scaled(norm.data.to(dtype or x.data.dtype), x.scale)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

OPS: dict[Rule, tuple[Any, ...]] = {
    _nll_loss: (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
    loss: (aten.mse_loss.default, aten.binary_cross_entropy_with_logits.default),
    _vector_norm: (aten.linalg_vector_norm.default,),
    _zeros: (aten.new_empty_strided.default, aten.zeros_like.default),
    _new_zeros: (aten.new_zeros.default,),
    _classify: (aten.isnan.default, aten.isinf.default, aten.isfinite.default),
    _on_data: (
        aten.argmax.default, aten.argmin.default, aten.sign.default, aten.sgn.default, aten.is_same_size.default,
        aten.empty_like.default, aten.ones_like.default, aten.full_like.default, aten.rand_like.default,
        aten.new_empty.default, aten.new_ones.default, aten.new_full.default,
    ),
    _on_values: (
        aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default, aten.all.default,
        aten.any.default, aten.bernoulli.default, aten.multinomial.default,
        *(getattr(aten, n).Tensor for n in _COMPARISONS),
    ),
    _compared_with: tuple(getattr(aten, n).Scalar for n in _COMPARISONS),
}  # fmt: skip
