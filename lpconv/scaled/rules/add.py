"""Sums: operands are brought to a common scale."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from lpconv.formats.scale import amax, pow2_floor
from lpconv.scaled.pair import Call, Role, Rule, Scaled, data_of, in_units_of, pair, value, with_nonzero_scale
from lpconv.scaled.rules.layout import fill_value
from lpconv.scaled.rules.multiply import contraction_factor
from lpconv.scaled.scales import Scale, larger_scale, multiply, ratio, split_number, times

aten = torch.ops.aten

_EPSILON = 2.0**-9  # above any usual epsilon


def at_scale(data: Any, scale: Scale, target: Scale) -> Any:
    """`data` in units of `target` instead of `scale`; numbers become fp64 tensors if a scale is dynamic."""
    factor = ratio(scale, target)
    if isinstance(data, Tensor):
        return times(data, factor)
    return data * (factor.double() if isinstance(factor, Tensor) else factor)


def _addends(*operands: Any) -> list[tuple[Any, Scale]]:
    """(data, scale) of each operand, in the dtype to which torch promotes them; 0-dim floats keep theirs."""
    pairs = list(map(pair, operands))
    floats = [x for x, _ in pairs if isinstance(x, Tensor) and not _is_integer(x)]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in floats if x.dim()] or [floats[0].dtype])
    keeps = [not isinstance(x, Tensor) or (x.dim() == 0 and not _is_integer(x)) for x, _ in pairs]
    return [(x if keep else x.to(dtype), scale) for keep, (x, scale) in zip(keeps, pairs, strict=True)]


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _at_larger(a: Any, b: Any) -> tuple[Any, Any, Scale]:
    """The data of two operands at the larger of their scales, and that scale."""
    (data_a, scale_a), (data_b, scale_b) = _addends(a, b)
    scale = larger_scale(scale_a, scale_b)
    return at_scale(data_a, scale_a, scale), at_scale(data_b, scale_b, scale), scale


def _add(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Scaled:
    """(d_a·s_a/s + alpha·d_b·s_b/s, s), s = max(s_a, s_b), which is √(s_a² + s_b²) floored to a power of two.

    An epsilon keeps the scale of the tensor, as in layer norm: a norm written in pieces then divides data by their own
    size, and brings data far from 1 back to it.
    """
    (data_a, scale_a), (data_b, scale_b) = _addends(a, b)
    if alpha != 1:
        mantissa, power = split_number(float(alpha))
        data_b, scale_b = data_b * mantissa, multiply(scale_b, power)
    fit = call.numerics.fit_joins and isinstance(data_a, Tensor) and isinstance(data_b, Tensor)
    scale = (_fitting_scale if fit else _scale_of_sum)(data_a, scale_a, data_b, scale_b)
    out = _weighted_sum(data_a, ratio(scale_a, scale), data_b, ratio(scale_b, scale))
    if isinstance(data_a, float) or isinstance(data_b, float):
        out = out.to((data_b if isinstance(data_a, float) else data_a).dtype)
    return Scaled(out, scale)


def _scale_of_sum(data_a: Any, scale_a: Scale, data_b: Any, scale_b: Scale) -> Scale:
    """The larger scale, or for an epsilon that of the tensor, if it is large enough for epsilon/s to fit the dtype."""
    for data, scale, number, power in ((data_a, scale_a, data_b, scale_b), (data_b, scale_b, data_a, scale_a)):
        if isinstance(number, float) and abs(number) * power < _EPSILON and (isinstance(scale, Tensor) or scale):
            return larger_scale(scale, multiply(power, 4 / torch.finfo(data.dtype).max))
    return larger_scale(scale_a, scale_b)


def _weighted_sum(a: Any, factor_a: Scale, b: Any, factor_b: Scale) -> Any:
    """a·factor_a + b·factor_b; if one factor is 1, the addition applies the other without a pass of its own.

    The sum has the strides of the first operand, so operands of different strides are not exchanged.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and b.dim():
        if isinstance(factor_b, float) and isinstance(factor_a, float) and factor_a == 1.0:
            return torch.add(a, b, alpha=factor_b)
        exchangeable = a.shape != b.shape or a.stride() == b.stride()
        if isinstance(factor_b, float) and isinstance(factor_a, float) and factor_b == 1.0 and exchangeable:
            return torch.add(b, a, alpha=factor_a)
    return at_scale(a, factor_a, 1.0) + at_scale(b, factor_b, 1.0)


def _sub(call: Call, a: Any, b: Any, *, alpha: float = 1) -> Scaled:
    """`_add` with b negated."""
    return _add(call, a, b, alpha=-alpha)


def _rsub(call: Call, a: Any, b: Any, alpha: float = 1) -> Scaled:
    """b - alpha·a."""
    return _add(call, b, a, alpha=-alpha)


def _fitting_scale(data_a: Tensor, scale_a: Scale, data_b: Tensor, scale_b: Scale) -> Tensor:
    """The smallest power of two not below min(s_a, s_b) at which the sum of the largest magnitudes fits the dtype.

    Adaptive loss scaling §1.4 in our convention, where the loss scale is 1/s. The reference bounds the largest summand;
    the sum of K of them may then overflow by a factor K, so here the sum of the maxima is bounded.
    """
    amax_a, amax_b = times(amax(data_a).float(), scale_a), times(amax(data_b).float(), scale_b)
    limit = torch.finfo(torch.promote_types(data_a.dtype, data_b.dtype)).max
    smallest_fit = 2 * pow2_floor((amax_a + amax_b) / limit)
    scales = (torch.as_tensor(s, dtype=torch.float32, device=data_a.device) for s in (scale_a, scale_b))
    finer = torch.minimum(*(torch.where(s > 0, s, torch.inf) for s in scales))  # zeros do not count
    return torch.where(smallest_fit.isfinite(), torch.maximum(finer, smallest_fit), finer)


def _common_scale(pieces: list[Any]) -> Scale:
    """The largest scale among the non-empty pieces."""
    scale: Scale = 0.0
    for piece in pieces:
        if data_of(piece).numel():
            scale = larger_scale(scale, pair(piece)[1])
    return scale


def _cat(call: Call, pieces: list[Any], *args: Any) -> Scaled:
    """cat and stack of d_i·s_i/s at s = max s_i; empty pieces do not count."""
    scale = _common_scale(pieces)
    return Scaled(call.op([at_scale(*p, scale) for p in _addends(*pieces)], *args), scale)


def _where(call: Call, condition: Tensor, a: Any, b: Any) -> Scaled:
    """where(c, d_a·s_a/s, d_b·s_b/s) at s = max(s_a, s_b); a plain 0-dim operand is a fill, at the other's scale.

    Otherwise a fill of 0 (from clamp's backward pass) would raise a gradient to the scale 1, and finfo.min would
    overflow as a scale.
    """
    dtype = torch.result_type(data_of(a), data_of(b))
    if isinstance(a, Scaled) and not isinstance(b, Scaled) and b.dim() == 0:
        at: Scaled = with_nonzero_scale(a.with_data(a.data.to(dtype)))
        return at.with_data(call.op(condition, at.data, in_units_of(b, at)))
    if isinstance(b, Scaled) and not isinstance(a, Scaled) and a.dim() == 0:
        at = with_nonzero_scale(b.with_data(b.data.to(dtype)))
        return at.with_data(call.op(condition, in_units_of(a, at), at.data))
    data_a, data_b, scale = _at_larger(a, b)
    return Scaled(call.op(condition, data_a, data_b), scale)


def _index_put(call: Call, base: Any, indices: Any, values: Any, accumulate: bool = False) -> Scaled:
    """Both at the larger scale; the zeros at the start of an index's backward pass have any scale.

    Plain values in a gradient are taken at its scale: they are zeros if plain numbers were written in the forward pass.
    """
    if isinstance(base, Scaled) and base.role is Role.GRADIENT and not isinstance(values, Scaled):
        base = with_nonzero_scale(base)
        values = base.with_data(in_units_of(values, base))
    data_base, data_values, scale = _at_larger(base, values)
    return Scaled(call.op(data_base, indices, data_values, accumulate), scale)


def _scatter(call: Call, base: Any, dim: int, index: Tensor, values: Any, **kwargs: Any) -> Scaled:
    """scatter, scatter_add and index_add, both at the larger scale; used by the backward pass of gathering ops."""
    data_base, data_values, scale = _at_larger(base, values)
    return Scaled(call.op(data_base, dim, index, data_values, **kwargs), scale)


def _joined(call: Call, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
    """maximum, minimum and writes of b into a part of a, which keep the dtype of a, at the larger scale."""
    if isinstance(a, Tensor) and not a.is_floating_point() and "scatter" in call.op._opname:
        return call.op(a, value(b), *args, **kwargs)
    data_a, data_b, scale = _at_larger(a, b)
    out = call.op(data_a, data_b, *args, **kwargs)
    return Scaled(out.to(data_of(a).dtype) if "scatter" in call.op._opname else out, scale)


def _sum(call: Call, x: Scaled, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Scaled:
    """(Σd / r, s·r) with r = 2^⌊log2 √n⌋. 16-bit data are summed in fp32, since Σd itself may not fit."""
    dims = list(dims or range(x.data.dim()))
    r = contraction_factor(call, math.prod(x.data.shape[d] for d in dims if x.data.dim()))
    out = dtype or x.data.dtype
    wide = torch.promote_types(out, torch.float32)
    where = () if call.op is aten.sum.default else (dims, keepdim)  # another order of terms than with all dimensions
    total = call.op(x.data, *where, dtype=None if wide == x.data.dtype else wide)
    return Scaled(times(total, 1 / r).to(out), multiply(x.scale, r), x.role)


def _clamp(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    """(clamp(d, low/s, high/s), s), finite bounds stay finite; numbers as bounds need a static scale."""
    if not isinstance(x, Scaled) or isinstance(low, Scaled) or isinstance(high, Scaled):
        return NotImplemented
    x = with_nonzero_scale(x)
    if isinstance(x.scale, Tensor) and not isinstance(low, Tensor) and not isinstance(high, Tensor):
        return Scaled(aten.clamp(value(x), low, high).to(x.data.dtype), 1.0, x.role)
    at_x = [b if b is None else in_units_of(b, x) if isinstance(b, Tensor) else fill_value(x, b) for b in (low, high)]
    return x.with_data(aten.clamp(x.data, *at_x))


OPS: dict[Rule, tuple[Any, ...]] = {
    _add: (aten.add.Tensor, aten.add.Scalar),
    _sub: (aten.sub.Tensor, aten.sub.Scalar),
    _rsub: (aten.rsub.Scalar, aten.rsub.Tensor),
    _cat: (aten.cat.default, aten.stack.default),
    _where: (aten.where.self,),
    _index_put: (aten.index_put.default,),
    _joined: (
        aten.slice_scatter.default, aten.select_scatter.default, aten.maximum.default, aten.minimum.default,
    ),
    _scatter: (aten.scatter.src, aten.scatter_add.default, aten.index_add.default),
    _sum: (aten.sum.dim_IntList, aten.sum.default),
    _clamp: (
        aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default, aten.clamp_min.default, aten.clamp_min.Tensor,
    ),
    lambda call, x, high: _clamp(call, x, None, high): (aten.clamp_max.default,),
}  # fmt: skip
