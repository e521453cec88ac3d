"""Operands of low-precision products: numbers cast at a scale of some kind, and the product of two of them.

| kind of scale | one scale per | from |
|---|---|---|
| static | tensor | nothing, or a calibration before the run; a constant from then on |
| l2 | tensor | the root mean square, a power of two |
| max | tensor | the largest magnitude, a power of two |
| tensor | tensor | the largest magnitude |
| delayed | tensor | the largest magnitude of the last calls |
| row | row along the summed axis | the largest magnitude of the row |
| mx | 32 elements along the summed axis | the largest magnitude of the block, a power of two (OCP MX 1.0 §6.3) |

What is too large saturates under static, l2, delayed and mx; the others find scales that clip nothing. Data with Inf or
NaN have NaN where a scale is made of them, so that an overflow is seen behind the cast too.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lpconv.formats.cast import Overflow, Rounding
from lpconv.formats.codes import code_dtype
from lpconv.formats.scale import pow2_ceil, pow2_floor
from lpconv.formats.spec import Format, get_format
from lpconv.kernels.decode import decode, decode_operand
from lpconv.kernels.matmul import matmul
from lpconv.kernels.quantise import fake_quantise
from lpconv.kernels.scaled_cast import largest_magnitude, scale_product_, scaled_codes, scaled_values
from lpconv.lookup import find

_KINDS = dict.fromkeys(("static", "l2", "max", "tensor", "delayed", "row", "mx"))
_SATURATING = ("static", "l2", "delayed")
_POWERS_OF_TWO = ("static", "l2", "max")
_SMALLEST = 2.0**-100  # of a statistic: 1 / scale stays finite, for rows of zeros too (pytorch/ao issue 3356)
_MX_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class OperandCast:
    """How numbers become an operand: format, kind of scale, what becomes of numbers that are too large, and rounding.

    16-bit formats overflow to Inf, for a loss scaler to see; `overflow` "inf" lets e5m2 do so. With `narrow` bfloat16
    data are multiplied by a factor in bfloat16: it has 8 bits, but the data need not be widened. The largest element
    may then come out above the largest number by less than half a step, and is rounded down to it.
    """

    format: str = "e4m3fn"
    scale: str = "static"
    overflow: Overflow = "saturate"
    rounding: Rounding = "nearest"
    narrow: bool = False

    def __post_init__(self) -> None:
        find("operand scale", self.scale, _KINDS)

    @property
    def spec(self) -> Format:
        """The number format."""
        return get_format(self.format)

    @property
    def has_one_scale(self) -> bool:
        """Whether one scale serves the tensor, so that the same codes can be summed along either axis."""
        return self.scale not in ("row", "mx")


class Coded(NamedTuple):
    """value = codes · scale.

    The scale is 1.0, a 0-dim fp32 tensor, or one number for each row, column or block. In place of 8-bit codes there
    may be their values in bfloat16, if they are multiplied at once.
    """

    codes: Tensor
    scale: float | Tensor

    @property
    def mT(self) -> "Coded":
        """The transpose; not of blocks."""
        scale = self.scale
        return Coded(self.codes.mT, scale.mT if isinstance(scale, Tensor) and scale.dim() else scale)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The values, rounded to `dtype` once more if the scale is not a power of two."""
        values = decode(self.codes, dtype)
        return values if isinstance(self.scale, float) else scale_product_(values, self.scale)


def encode_operand(
    x: Tensor, cast: OperandCast, *, axis: int | None = None, state: Tensor | None = None, into: str | None = None
) -> Coded:
    """`x` cast to nearest even (or as `cast` says), at a scale that is found for it; arguments as below."""
    return encode_at(x, inverse_scale(x, cast, axis=axis, state=state), cast, into=into)


def inverse_scale(
    x: Tensor, cast: OperandCast, *, axis: int | None = None, state: Tensor | None = None
) -> Tensor | None:
    """The number that brings `x` into the range of the format, or None for 1; NaN if `x` is not finite.

    With "row" slices along `axis`, the summed one, have one each (None: one for the tensor). `state` is the calibrated
    scale of "static", or the largest magnitudes before this call of "delayed", which is updated. Blocks have theirs in
    `encode_at`.
    """
    spec = cast.spec
    if cast.scale == "static":
        inverse = None if state is None else 1 / state
    elif cast.scale == "mx" or not x.numel():
        inverse = None
    elif cast.scale == "l2":
        inverse = 1 / pow2_floor(_bounded(x.float().square().mean().sqrt()))
    elif cast.scale == "max":
        inverse = 1 / pow2_ceil(_bounded(largest_magnitude(x) / spec.max))
    else:
        largest = largest_magnitude(x, axis if cast.scale == "row" else None)
        largest = _bounded(_update_history(largest, state) if cast.scale == "delayed" else largest)
        # torch computes number / tensor as number · (1 / tensor), which rounds twice and moves elements off ties.
        inverse = spec.max / largest if cast.narrow else 1 / (largest / spec.max)
    if inverse is None or x.dtype != torch.bfloat16:
        return inverse
    return inverse.to(x.dtype) if cast.narrow or cast.scale in _POWERS_OF_TWO else inverse


def encode_at(x: Tensor, inverse: Tensor | None, cast: OperandCast, *, into: str | None = None) -> Coded:
    """`x` · `inverse` in the format of `cast`.

    `into` names memory that is taken again for the next operand of that name: there a CPU keeps the codes' values, if
    it makes them faster, for an operand that is used up at once.
    """
    spec = cast.spec
    if cast.scale == "mx":
        return _encode_blocks(x, spec)
    scale = 1.0 if inverse is None else 1 / inverse.float()
    if cast.rounding != "nearest" or spec.bits != 8:
        values = x if inverse is None else x.to(torch.promote_types(x.dtype, inverse.dtype)) * inverse
        if cast.rounding != "nearest":
            values = fake_quantise(values, spec, rounding=cast.rounding, overflow=cast.overflow)
        return Coded(values.to(code_dtype(spec)), scale)
    saturate = cast.scale in _SATURATING and not (cast.overflow == "inf" and spec.has_inf)
    if into is not None and inverse is not None and not saturate:
        wide = scaled_values(x, inverse, spec, into)
        if wide is not None:
            return Coded(wide, scale)
    return Coded(scaled_codes(x, inverse, spec, saturate=saturate), scale)


def coded_product(a: Coded, b: Coded, *, bias: Tensor | None = None, out_dtype: torch.dtype) -> Tensor:
    """a @ bᵀ + bias in `out_dtype`, for a (…, M, K) and b (…, N, K), both cast along their last axis."""
    if isinstance(a.scale, Tensor) and a.scale.dim() and a.scale.shape[-1] > 1:
        # No tensor core below compute capability 10 has block scales; in bfloat16 the values are exact.
        out = torch.mm(_block_values(a), _block_values(b).t()).to(out_dtype)
        return out if bias is None else out.add_(bias)
    left, right = a.codes, b.codes
    if left.dtype != right.dtype and torch.bfloat16 in (left.dtype, right.dtype):
        left = left if left.dtype == torch.bfloat16 else decode_operand(left, torch.bfloat16, "left")
        right = right if right.dtype == torch.bfloat16 else decode_operand(right, torch.bfloat16, "right")
    if isinstance(b.scale, Tensor) and b.scale.dim():
        scale_a, scale_b = _number(a.scale, left.device), b.scale.mT
    else:
        scale_a, scale_b = _number(a.scale * b.scale, left.device), None
    return matmul(left, right.mT, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype)


def _number(scale: float | Tensor, device: torch.device) -> Tensor | None:
    """A scale as `matmul` takes it."""
    if isinstance(scale, Tensor):
        return scale
    return None if scale == 1.0 else torch.full((), scale, device=device)


def _bounded(size: Tensor) -> Tensor:
    return torch.where(size.isfinite(), size.clamp(min=_SMALLEST), torch.nan)


def _update_history(largest: Tensor, history: Tensor | None) -> Tensor:
    """The largest magnitude of the calls before this one, which is put in the oldest one's place."""
    assert history is not None, "`use_recipe` makes it"
    before = history.amax()
    history.copy_(torch.cat([largest.view(1), history[:-1]]))
    return before


def _encode_blocks(x: Tensor, spec: Format) -> Coded:
    """Codes (R, C), padded with zeros to whole blocks, and scales (R, blocks)."""
    x = F.pad(x, (0, -x.shape[1] % _MX_BLOCK))
    blocks = x.float().reshape(x.shape[0], -1, _MX_BLOCK)
    scale = (pow2_floor(blocks.abs().amax(-1)) * 2.0**-spec.max_exponent).clamp(min=2.0**-126)
    return Coded(scaled_codes(blocks, (1 / scale).unsqueeze(-1), spec, saturate=True).view(x.shape), scale)


def _block_values(x: Coded) -> Tensor:
    assert isinstance(x.scale, Tensor), "blocks have scales"
    values = decode(x.codes, torch.bfloat16).view(*x.scale.shape, _MX_BLOCK)
    return (values * x.scale.to(torch.bfloat16).unsqueeze(-1)).view(x.codes.shape)
