"""Operands of low-precision matrix products: how each is scaled and cast, and the product of two.

| kind of scale | one scale per | computed from |
|---|---|---|
| static | tensor | nothing, or a calibration before the run; constant during the run |
| l2 | tensor | the root mean square, a power of two |
| max | tensor | the largest magnitude, a power of two |
| tensor | tensor | the largest magnitude |
| delayed | tensor | the largest magnitude in recent calls |
| row | row along the summed axis | the largest magnitude of the row |
| mx | 32 elements along the summed axis | the largest magnitude of the block, a power of two (OCP MX 1.0 §6.3) |

With static, l2, delayed and mx scales, values beyond the format's range saturate; the other scales clip nothing. If a
scale is computed from data with Inf or NaN, it is NaN, so that an overflow remains visible after the cast.
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
    """How to cast an operand: number format, kind of scale, treatment of overflow, and rounding.

    16-bit formats overflow to Inf, which a loss scaler can detect; with `overflow` "inf", e5m2 does too. With `narrow`,
    bfloat16 data are multiplied by a bfloat16 factor: it has only 8 significant bits, but the data need not be widened.
    The largest element may then exceed the largest number by less than half a step, and is rounded down to it.
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
    """An operand after the cast: value = codes · scale.

    The scale is 1.0, a 0-dim fp32 tensor, or one number per row, column or block. `codes` may instead hold their values
    in bfloat16, for an operand that is multiplied immediately.
    """

    codes: Tensor
    scale: float | Tensor

    @property
    def mT(self) -> "Coded":
        """The transpose. Not defined for block scales."""
        scale = self.scale
        return Coded(self.codes.mT, scale.mT if isinstance(scale, Tensor) and scale.dim() else scale)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decode to `dtype`, with one more rounding if the scale is not a power of two."""
        values = decode(self.codes, dtype)
        return values if isinstance(self.scale, float) else scale_product_(values, self.scale)


def encode_operand(
    x: Tensor, cast: OperandCast, *, axis: int | None = None, state: Tensor | None = None, into: str | None = None
) -> Coded:
    """Compute a scale for `x` and cast it. Arguments as for `inverse_scale` and `encode_at`."""
    return encode_at(x, inverse_scale(x, cast, axis=axis, state=state), cast, into=into)


def inverse_scale(
    x: Tensor, cast: OperandCast, *, axis: int | None = None, state: Tensor | None = None
) -> Tensor | None:
    """Factor that brings `x` into the range of the format; None means 1. NaN if `x` is not finite.

    For "row", there is one factor per slice along `axis`, the summed dimension (None: one for the tensor). `state` is
    the calibrated scale for "static", or for "delayed" the history of largest magnitudes, which is updated. Scales of
    blocks are computed in `encode_at`.
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
    """Cast `x` · `inverse` to the format of `cast`.

    `into` names a buffer that is reused by the next operand of the same name. A CPU stores the decoded values there if
    that is faster than storing codes; use it only for an operand that is multiplied immediately.
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
    """Convert a scale to the type that `matmul` expects; None for 1."""
    if isinstance(scale, Tensor):
        return scale
    return None if scale == 1.0 else torch.full((), scale, device=device)


def _bounded(size: Tensor) -> Tensor:
    return torch.where(size.isfinite(), size.clamp(min=_SMALLEST), torch.nan)


def _update_history(largest: Tensor, history: Tensor | None) -> Tensor:
    """Return the largest magnitude in earlier calls, and replace the oldest entry of the history by `largest`."""
    assert history is not None, "`use_recipe` makes it"
    before = history.amax()
    history.copy_(torch.cat([largest.view(1), history[:-1]]))
    return before


def _encode_blocks(x: Tensor, spec: Format) -> Coded:
    """Encode `x` (R, C), padded with zeros to whole blocks, with scales (R, blocks)."""
    x = F.pad(x, (0, -x.shape[1] % _MX_BLOCK))
    blocks = x.float().reshape(x.shape[0], -1, _MX_BLOCK)
    scale = (pow2_floor(blocks.abs().amax(-1)) * 2.0**-spec.max_exponent).clamp(min=2.0**-126)
    return Coded(scaled_codes(blocks, (1 / scale).unsqueeze(-1), spec, saturate=True).view(x.shape), scale)


def _block_values(x: Coded) -> Tensor:
    assert isinstance(x.scale, Tensor), "blocks have scales"
    values = decode(x.codes, torch.bfloat16).view(*x.scale.shape, _MX_BLOCK)
    return (values * x.scale.to(torch.bfloat16).unsqueeze(-1)).view(x.codes.shape)
