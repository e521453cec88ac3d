"""Products: scales multiply. A contraction over K terms moves √K from the data to the scale [Scalify §1.4, dot].

The factor 1/r of a contraction, r = 2^⌊log2 √K⌋, is passed as the `alpha` of BLAS (`addmm` and `baddbmm` with beta =
0), so it costs no pass over the result.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lpconv.formats.scale import pow2_floor
from lpconv.kernels.matmul import at_half
from lpconv.scaled.operands import grouped_product, product
from lpconv.scaled.pair import Call, Rule, Scaled, pair, value, with_nonzero_scale
from lpconv.scaled.scales import Scale, larger_scale, multiply, ratio, split_number, times

aten = torch.ops.aten


def contraction_factor(call: Call, num_terms: float) -> float:
    """r = 2^⌊log2 √K⌋: the standard deviation of a sum of K independent unit terms, rounded down to a power of two.

    Under native unit scaling, √K itself. K is a mean if the numbers of terms differ.
    """
    if not call.numerics.unit_factors or num_terms < 2:
        return 1.0
    if call.numerics.native:
        return math.sqrt(num_terms)
    return float(pow2_floor(math.sqrt(num_terms)))


def _mul(call: Call, a: Any, b: Any) -> Scaled:
    """(d_a·d_b, s_a·s_b)."""
    (data_a, scale_a), (data_b, scale_b) = pair(a), pair(b)
    scale = multiply(scale_a, scale_b)
    if isinstance(data_a, Tensor) and isinstance(data_b, Tensor):
        return Scaled(data_a * data_b, scale)
    return Scaled(times(data_a, data_b) if isinstance(data_a, Tensor) else times(data_b, data_a), scale)


def _div(call: Call, a: Any, b: Any) -> Scaled:
    """(d_a/d_b, s_a/s_b). A static zero as the divisor keeps the numerator's scale and gives inf or NaN."""
    (data_a, scale_a), (data_b, scale_b) = pair(a), pair(b)
    if isinstance(scale_b, float) and scale_b == 0:
        return Scaled(data_a / data_b, scale_a)
    if isinstance(data_b, float) and data_b == 1.0:
        return Scaled(data_a, ratio(scale_a, scale_b))
    return Scaled(data_a / data_b, ratio(scale_a, scale_b))


def _reciprocal(call: Call, x: Scaled) -> Scaled:
    """(1/d, 1/s)."""
    x = with_nonzero_scale(x)
    return Scaled(x.data.reciprocal(), ratio(1.0, x.scale))


def _square_scale(scale: Scale) -> tuple[Scale, Scale]:
    """(h, f) with s = h²·f, h a power of two and f 1 or 2: an odd exponent leaves a factor 2 for the data."""
    half: Scale = pow2_floor(scale.sqrt()) if isinstance(scale, Tensor) else pow2_floor(math.sqrt(scale))
    return half, scale / half / half


def _sqrt(call: Call, x: Scaled) -> Scaled:
    """(√(f·d), h) with s = h²·f: the scale stays a power of two."""
    if isinstance(x.scale, float) and x.scale == 0:
        return x
    half, factor = _square_scale(x.scale)
    return Scaled(torch.sqrt(times(x.data, factor)), half)


def _rsqrt(call: Call, x: Scaled) -> Any:
    """(1/√(f·d), 1/h) with s = h²·f."""
    if isinstance(x.scale, float) and x.scale == 0:
        return NotImplemented
    half, factor = _square_scale(x.scale)
    return Scaled(torch.rsqrt(times(x.data, factor)), ratio(1.0, half))


def power(call: Call, x: Scaled, exponent: Any) -> Any:
    """(d^y, s^y) for integer y, square roots for y = ±½, and ((d·s)^y, 1) if s^y is not a valid scale."""
    if not isinstance(exponent, (int, float)):
        return NotImplemented
    if exponent == 0.5:
        return _sqrt(call, x)
    if exponent == -0.5:
        return _rsqrt(call, x)
    if exponent != int(exponent) or not _can_raise(x.scale, int(exponent)):
        return Scaled(torch.pow(value(x), exponent).to(x.data.dtype), 1.0)
    return Scaled(torch.pow(x.data, exponent), x.scale ** int(exponent))


def _prod(call: Call, x: Scaled, *args: Any, **kwargs: Any) -> Scaled:
    """(Πd, s^n) over n elements [Scalify §1.4, reduce_prod]; (Πvalue, 1) for 16 bits or if s^n is beyond fp64."""
    num_factors = x.data.shape[args[0]] if args and x.data.dim() else x.data.numel()
    if x.data.itemsize == 2 or not _can_raise(x.scale, num_factors):
        return Scaled(call.op(value(x), *args, **kwargs).to(x.data.dtype), 1.0)
    return Scaled(call.op(x.data, *args, **kwargs), x.scale**num_factors)


def _can_raise(scale: Scale, exponent: int) -> bool:
    """Whether this power of a static scale is within double precision."""
    if isinstance(scale, Tensor):
        return True
    return exponent >= 0 if scale == 0 else abs(math.log2(scale) * exponent) <= 1000


def _matmul(call: Call, a: Any, b: Any) -> Scaled:
    """mm and bmm: (d_a·d_b / r, s_a·s_b·r)."""
    scale = multiply(pair(a)[1], pair(b)[1])
    r = contraction_factor(call, pair(a)[0].shape[-1])
    return Scaled(product(call.numerics, a, b, alpha=1 / r), multiply(scale, r))


def _matrix_vector(call: Call, a: Any, b: Any) -> Scaled:
    """mv and dot, as the product with a matrix of one column."""
    (data_a, scale_a), (data_b, scale_b) = pair(a), pair(b)
    row, column = Scaled(data_a if data_a.dim() > 1 else data_a[None], scale_a), Scaled(data_b.unsqueeze(1), scale_b)
    out = _matmul(call, row, column)
    return out.with_data(out.data.reshape(data_a.shape[:-1]))


def _add_matmul(call: Call, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Scaled:
    """addmm and baddbmm: a product and its bias at the larger of their scales, both factors in one BLAS call."""
    a, b, (data_bias, scale_bias) = with_nonzero_scale(a), with_nonzero_scale(b), pair(bias)
    (mantissa, power), (mantissa_bias, power_bias) = split_number(float(alpha)), split_number(float(beta))
    scale_ab = multiply(multiply(pair(a)[1], pair(b)[1]), power)
    scale_bias = multiply(scale_bias, power_bias)
    r = contraction_factor(call, pair(a)[0].shape[-1])
    scale = larger_scale(multiply(scale_ab, r), scale_bias)
    if isinstance(scale, float):
        at_scale = times(data_bias, mantissa_bias * ratio(scale_bias, scale))
        gain = mantissa * float(ratio(scale_ab, scale))
        return Scaled(product(call.numerics, a, b, alpha=gain, bias=at_scale), scale)
    product_scale = multiply(scale_ab, r)
    in_product = times(data_bias, mantissa_bias * ratio(scale_bias, product_scale))
    data = product(call.numerics, a, b, alpha=mantissa / r, bias=in_product)
    return Scaled(times(data, ratio(product_scale, scale)), scale)


def _grouped_matmul(
    call: Call, a: Any, b: Any, offsets: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """A product per expert: (d_a·d_b / r, s_a·s_b·r). K is a mean if the experts divide the summed axis."""
    if bias is not None:
        return NotImplemented
    (data_a, scale_a), (data_b, scale_b) = pair(a), pair(b)
    num_terms = data_a.shape[-1] / (len(offsets) if data_a.dim() == data_b.dim() == 2 else 1)
    out = grouped_product(call.numerics, a, b, lambda x, y: call.op(x, y, offsets))
    r = contraction_factor(call, num_terms)
    return Scaled(times(out, 1 / r).to(out_dtype or out.dtype), multiply(multiply(scale_a, scale_b), r))


def _convolution(call: Call, x: Any, weight: Any, bias: Any, *settings: Any) -> Scaled:
    """(conv(d_x, d_w, b/(s_x·s_w)) / r, s_x·s_w·r) with r from the fan-in; the reference has no fan-in factor."""
    (data_x, scale_x), (data_w, scale_w) = pair(with_nonzero_scale(x)), pair(with_nonzero_scale(weight))
    scale = multiply(scale_x, scale_w)
    if bias is not None:
        data_bias, scale_bias = pair(bias)
        bias = times(data_bias, ratio(scale_bias, scale))
    r = contraction_factor(call, _terms(data_w, settings)[0])
    return Scaled(times(at_half(call.op, data_x, data_w, bias, *settings), 1 / r), multiply(scale, r))


def _convolution_backward(
    call: Call, grad: Any, x: Any, weight: Any, bias_sizes: list[int] | None, *args: Any
) -> tuple[Scaled | None, ...]:
    """Gradients of input, weight and bias at s_g·s_w, s_g·s_x and s_g, each with the √ of its number of terms."""
    (data_g, scale_g), (data_x, scale_x), (data_w, scale_w) = pair(grad), pair(x), pair(weight)
    grads = at_half(call.op, data_g, data_x, data_w, bias_sizes, *args)
    *settings, _ = args  # the last is the mask of requested gradients
    is_transposed = settings[3]
    other = data_x if is_transposed else data_g  # _mul by an element of the weight at every position
    terms = (_terms(data_w, settings)[1], other.numel() / other.shape[1], data_g.numel() / data_g.shape[1])
    scales = (multiply(scale_g, scale_w), multiply(scale_g, scale_x), scale_g)
    return tuple(
        None if g is None else Scaled(times(g, 1 / r), multiply(s, r))
        for g, s, r in zip(grads, scales, (contraction_factor(call, n) for n in terms), strict=True)
    )


def _terms(weight: Tensor, settings: Sequence[Any]) -> tuple[float, float]:
    """Number of products summed in an element of a convolution's result, and of its input's gradient.

    With a stride of s, on average only 1/s of the positions contribute to the gradient of an element.
    """
    stride, _, _, is_transposed, _, groups = settings
    gathered = math.prod(weight.shape[1:])
    scattered = weight[:, 0].numel() / groups / math.prod(stride)
    return (scattered, gathered) if is_transposed else (gathered, scattered)


OPS: dict[Rule, tuple[Any, ...]] = {
    _mul: (aten.mul.Tensor, aten.mul.Scalar),
    _div: (aten.div.Tensor, aten.div.Scalar),
    _reciprocal: (aten.reciprocal.default,),
    _sqrt: (aten.sqrt.default,),
    _rsqrt: (aten.rsqrt.default,),
    power: (aten.pow.Tensor_Scalar,),
    _prod: (aten.prod.default, aten.prod.dim_int),
    _matmul: (aten.mm.default, aten.bmm.default),
    _matrix_vector: (aten.mv.default, aten.dot.default),
    _add_matmul: (aten.addmm.default, aten.baddbmm.default),
    _grouped_matmul: (aten._grouped_mm.default,),
    _convolution: (aten.convolution.default,),
    _convolution_backward: (aten.convolution_backward.default,),
}
