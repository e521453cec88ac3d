"""Ops that move or repeat elements, and homogeneous ones: f(d·s) = f(d)·s for s > 0."""

import math
from typing import Any

import torch
from torch import Tensor

from lpconv.formats.scale import amax, pow2_floor
from lpconv.scaled.pair import Call, Rule, Scaled, data_of, in_units_of, pair, value, with_nonzero_scale
from lpconv.scaled.scales import multiply, ratio, times

aten = torch.ops.aten


def layout(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Any:
    """(op(d), s) [Scalify §1.4: reshape, transpose, slice, neg, abs, reduce_max]."""
    out = call.op(x.data, *args, **kwargs)
    return x.with_data(out) if isinstance(out, Tensor) else [x.with_data(piece) for piece in out]


def with_indices(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Any:
    """((op(d)_0, s), indices): max and min along a dimension, topk, sort; also dropout with its mask."""
    first, *rest = call.op(x.data, *args, **kwargs)
    return (x.with_data(first), *rest)


def _embedding(call: Call, weight: Scaled, *args: Any, **kwargs: Any) -> Scaled:
    """(rows of d, s). Rows of a table are activations, even if the table itself is an exact operand elsewhere."""
    return Scaled(call.op(weight.data, *args, **kwargs), weight.scale)


def _to_copy(call: Call, x: Scaled, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """(cast(d), s): a cast affects the data only [Scalify §1.1]; a cast to integers or bool returns a plain tensor."""
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        return call.op(value(x), dtype=dtype, **kwargs)
    if call.numerics.fit_joins and dtype is not None and dtype.itemsize < x.data.itemsize:
        x = _fit_dtype(x, dtype, call.numerics.cast_underflow)
    return x.with_data(call.op(x.data, dtype=dtype, **kwargs))


def _fit_dtype(x: Scaled, dtype: torch.dtype, underflow: float = 0.0) -> Scaled:
    """`x` at the smallest scale, not below its own, at which the data fit `dtype`.

    With `underflow`, at a smaller scale if the data leave headroom: the one at which this fraction of log-normal data
    is below the smallest number u_min, factor exp(ln u_min - μ - σ·√2·erfinv(2T - 1)) for the mean μ and the deviation
    σ of the logarithms of non-zero elements [adaptive loss scaling, casts].
    """
    times_over = amax(x.data) / torch.finfo(dtype).max
    down = 0.5 / pow2_floor(times_over).float()
    target = _lognormal_factor(x.data, dtype, underflow) if underflow else torch.ones_like(down)
    factor = torch.where(times_over.isfinite() & (times_over > 0), torch.minimum(target, down), 1.0)
    return Scaled(times(x.data, factor), multiply(x.scale, 1 / factor), x.role)


def _lognormal_factor(data: Tensor, dtype: torch.dtype, underflow: float) -> Tensor:
    """The factor of `_fit_dtype` with underflow: a power of two from 1 to 2^64."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    logs = data.abs().float().log2()
    logs = logs.where(logs.isfinite(), torch.nan)
    mean = logs.nanmean()
    deviation = (logs - mean).square().nanmean().sqrt()
    quantile = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * underflow - 1, dtype=torch.float64)))
    power = math.log2(smallest) - mean - deviation * quantile
    return torch.exp2(power.nan_to_num(0.0).floor().clamp(0, 64))


def fill_value(x: Scaled, fill: float) -> float:
    """`fill` in units of the static scale; finite fills stay finite in the dtype of the data (finfo.min is a mask)."""
    assert isinstance(x.scale, float)
    limit = torch.finfo(x.data.dtype).max
    return fill if math.isinf(fill) else min(max(fill / x.scale, -limit), limit)


def _masked_fill(call: Call, x: Any, mask: Tensor, fill: Any) -> Any:
    """(masked_fill(d, fill/s), s): the tensor keeps its scale for any mask constant."""
    if not isinstance(x, Scaled) or isinstance(fill, Scaled):
        return NotImplemented
    x = with_nonzero_scale(x)
    if isinstance(x.scale, float) and not isinstance(fill, Tensor):
        return x.with_data(aten.masked_fill.Scalar(x.data, mask, fill_value(x, float(fill))))
    constant = torch.as_tensor(fill, dtype=torch.promote_types(x.data.dtype, torch.float32), device=x.data.device)
    return x.with_data(aten.masked_fill.Tensor(x.data, mask, in_units_of(constant, x)))


def _insert_number(call: Call, x: Scaled, *places_and_fill: Any) -> Scaled:
    """(op(d, …, fill/s), s); under a dynamic scale a fill other than 0 gives (op(value, …, fill), 1)."""
    *places, fill = places_and_fill
    if fill == 0:
        return x.with_data(call.op(x.data, *places, 0.0))
    x = with_nonzero_scale(x)
    if isinstance(x.scale, Tensor):
        return Scaled(call.op(value(x), *places, fill).to(x.data.dtype), 1.0)
    return x.with_data(call.op(x.data, *places, fill_value(x, float(fill))))


def _variance(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Scaled:
    """(var(d), s²)."""
    return Scaled(call.op(x.data, *args, **kwargs), multiply(x.scale, x.scale))


def _conjugate(call: Call, x: Scaled) -> Scaled:
    """(conj(d), s) in new memory: below autograd torch ignores that a tensor is a conjugate or negative view."""
    return x.with_data((aten.neg if call.op is aten._neg_view.default else aten.conj_physical)(x.data))


def _copy(call: Call, target: Any, source: Any, *args: Any) -> Scaled:
    """The source with the shape and dtype of the target, for a parameter also at its scale: rounded once."""
    data, scale = pair(source)
    own = target.scale if isinstance(target, Scaled) and target.role.is_stored else 0.0
    if isinstance(own, Tensor) or own:  # a static zero has any scale
        data, scale = times(data, ratio(scale, own)), own
    return Scaled(data.to(data_of(target).dtype).expand_as(data_of(target)), scale)


def _fill(call: Call, x: Any, number: Any) -> Scaled:
    """(the number's mantissa everywhere, its power of two)."""
    data, scale = pair(number)
    return Scaled(torch.ones_like(data_of(x)) * data, scale)


# Sums whose size depends on the correlation of their terms, which no theory predicts: refused by native unit scaling.
SUMS = (
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.col2im.default,
    aten._fft_c2c.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
)

OPS: dict[Rule, tuple[Any, ...]] = {
    _insert_number: (aten.scatter.value, aten.index_fill.int_Scalar),
    _variance: (aten.var.correction,),
    _conjugate: (aten._conj.default, aten._neg_view.default),
    _copy: (aten.copy.default,),
    _fill: (aten.fill.Scalar, aten.fill.Tensor),
    lambda call, x: x: (aten.detach.default, aten.alias.default),  # these matter to autograd only, above the rules
    _to_copy: (aten._to_copy.default,),
    _embedding: (aten.embedding.default,),
    lambda call, x, padding, fill=0.0: _insert_number(call, x, padding, fill): (aten.constant_pad_nd.default,),
    _masked_fill: (aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    with_indices: (
        aten.max.dim, aten.min.dim, aten.topk.default, aten.sort.default, aten.median.dim, aten.kthvalue.default,
        aten.cummax.default, aten.cummin.default, aten.native_dropout.default, aten.max_pool2d_with_indices.default,
    ),
    layout: (
        # other shapes and orders
        aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.as_strided.default,
        aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default, aten.unsqueeze.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flip.default, aten.roll.default,
        aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
        # copies and parts
        aten.clone.default, aten.repeat.default, aten.unfold.default, aten.slice.Tensor, aten.select.int,
        aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.index.Tensor,
        aten.index_select.default, aten.gather.default, aten.diagonal.default, aten.tril.default, aten.triu.default,
        # homogeneous functions, averages and extrema
        aten.neg.default, aten.abs.default, aten.relu.default, aten.leaky_relu.default, aten.cumsum.default,
        aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default, aten.max.default, aten.min.default,
        aten.upsample_bicubic2d.default, aten.upsample_bilinear2d.default, aten.im2col.default,
        aten.view_as_complex.default, aten.std.correction, *SUMS,
        # backward passes of some of these
        aten.slice_backward.default, aten.select_backward.default, aten.diagonal_backward.default,
        aten.unfold_backward.default, aten.native_dropout_backward.default,
    ),
}  # fmt: skip
