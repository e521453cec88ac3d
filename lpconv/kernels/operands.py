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
| nvfp4 | 16 elements, in e4m3fn, and one per tensor | the largest magnitudes of block and tensor |
| nvfp4-static | 16 elements, in e4m3fn | the largest magnitude of the block; the tensor's scale is 1 |
| four-six | as nvfp4 | the largest element of a block becomes 6 or 4, with the smaller error (arXiv 2512.02010) |
| ms-eden | as nvfp4 | largest magnitudes after a random rotation, corrected to be unbiased (arXiv 2601.22813) |

With static, l2, delayed and mx scales, values beyond the format's range saturate, and with nvfp4 by up to a sixteenth,
because the scale of a block is rounded; the other scales clip nothing. If a scale is computed from data with Inf or
NaN, it is NaN, so that an overflow remains visible after the cast.

Operands in four bits are emulated: each is kept as its values in bfloat16, which are exact. Those of NVFP4, e2m1 times
e4m3fn, have at most six significant bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lpconv.formats.cast import Overflow, Rounding
from lpconv.formats.codes import code_dtype
from lpconv.formats.scale import pow2_ceil, pow2_floor
from lpconv.formats.spec import OPERAND_BLOCKS, Format, get_format
from lpconv.kernels.decode import decode, decode_operand
from lpconv.kernels.matmul import matmul
from lpconv.kernels.quantise import fake_quantise
from lpconv.kernels.scaled_cast import largest_magnitude, scale_product_, scaled_codes, scaled_values
from lpconv.lookup import find

_KINDS = dict.fromkeys(("static", "l2", "max", "tensor", "delayed", "row", *OPERAND_BLOCKS))
_SATURATING = ("static", "l2", "delayed")
_POWERS_OF_TWO = ("static", "l2", "max")
_SMALLEST = 2.0**-100  # of a statistic: 1 / scale stays finite, for rows of zeros too (pytorch/ao issue 3356)
_E4M3_MAX = 448.0
_LARGEST_SCALE = 256.0  # of four-six and ms-eden, which raise scales by up to 1.5 and by their correction
# MS-EDEN scales the largest element of a block to 6 / (17/16 · 0.93), so far that the e4m3fn scale clips little of it:
# the constant of the paper's code with the least squared error.
_EDEN_MAX = 6 / (17 / 16 * 0.93)
_EDEN_SIZE = 128  # elements that MS-EDEN rotates together
_HADAMARD = 16  # size of the fixed rotation
# Signs before the rotation, so that a constant run does not become one large element: those of TransformerEngine.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True, kw_only=True)
class OperandCast:
    """How to cast an operand: number format, kind of scale, treatment of overflow, and rounding.

    16-bit formats overflow to Inf, which a loss scaler can detect; with `overflow` "inf", e5m2 does too. With `narrow`,
    bfloat16 data are multiplied by a bfloat16 factor: it has only 8 significant bits, but the data need not be widened.
    The largest element may then exceed the largest number by less than half a step, and is rounded down to it.

    For blocks in four bits: `square` gives each 16x16 elements one nvfp4 scale, so that a matrix and its transpose have
    the same values. `rotated` multiplies each 16 elements along the summed axis by a Hadamard matrix first, which
    spreads outliers; a product of two rotated operands is the product of the originals.
    """

    format: str = "e4m3fn"
    scale: str = "static"
    overflow: Overflow = "saturate"
    rounding: Rounding = "nearest"
    narrow: bool = False
    square: bool = False
    rotated: bool = False

    def __post_init__(self) -> None:
        find("operand scale", self.scale, _KINDS)

    @property
    def spec(self) -> Format:
        """The number format."""
        return get_format(self.format)

    @property
    def has_one_scale(self) -> bool:
        """Whether one scale serves the tensor, so that the same codes can be summed along either axis."""
        return self.scale != "row" and self.scale not in OPERAND_BLOCKS


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
        values = decode(self.codes, dtype) if self.codes.itemsize == 1 else self.codes.to(dtype, copy=True)
        return values if isinstance(self.scale, float) else scale_product_(values, self.scale)


def encode_operand(
    x: Tensor, cast: OperandCast, *, axis: int | None = None, state: Tensor | None = None, into: str | None = None
) -> Coded:
    """Compute a scale for `x` and cast it. Arguments as for `inverse_scale` and `encode_at`."""
    return encode_at(x, inverse_scale(x, cast, axis=axis, state=state), cast, state=state, into=into)


def inverse_scale(
    x: Tensor, cast: OperandCast, *, axis: int | None = None, state: Tensor | None = None
) -> Tensor | None:
    """Factor that brings `x` into the range of the format; None means 1. NaN if `x` is not finite.

    For "row", there is one factor per slice along `axis`, the summed dimension (None: one for the tensor). `state` is
    the calibrated scale for "static", for "delayed" the history of largest magnitudes, which is updated, or for
    "ms-eden" the `random_signs` that both operands of a product share. Scales of blocks are computed in `encode_at`.
    """
    spec = cast.spec
    if cast.scale == "static":
        inverse = None if state is None else 1 / state
    elif cast.scale in OPERAND_BLOCKS or not x.numel():
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


def encode_at(
    x: Tensor, inverse: Tensor | None, cast: OperandCast, *, state: Tensor | None = None, into: str | None = None
) -> Coded:
    """Cast `x` · `inverse` to the format of `cast`. `state` is what `inverse` was computed from, if that was a state.

    `into` names a buffer that is reused by the next operand of the same name. A CPU stores the decoded values there if
    that is faster than storing codes; use it only for an operand that is multiplied immediately.
    """
    spec = cast.spec
    if cast.scale in OPERAND_BLOCKS:
        return _encode_blocks(x, cast, state)
    scale = 1.0 if inverse is None else 1 / inverse.float()
    if cast.scale == "static" and state is not None:
        scale = state  # equal, but without a kernel launch
    if cast.rounding != "nearest" or spec.bits != 8:
        values = x if inverse is None else x.to(torch.promote_types(x.dtype, inverse.dtype)) * inverse
        if cast.rounding != "nearest" or spec.bits < 8:
            values = fake_quantise(values, spec, rounding=cast.rounding, overflow=cast.overflow)
        return Coded(values.to(torch.bfloat16 if spec.bits < 8 else code_dtype(spec)), scale)
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
        a, b = Coded(block_values(a), 1.0), Coded(block_values(b), 1.0)
    left, right = a.codes, b.codes
    if left.dtype != right.dtype and torch.bfloat16 in (left.dtype, right.dtype):
        left = left if left.dtype == torch.bfloat16 else decode_operand(left, torch.bfloat16, "left")
        right = right if right.dtype == torch.bfloat16 else decode_operand(right, torch.bfloat16, "right")
    scales: tuple[float | Tensor, float | Tensor]
    if isinstance(b.scale, Tensor) and b.scale.dim():
        scales = a.scale, b.scale.mT
    elif left.is_cuda and left.itemsize == 1:  # tensor cores take both, which saves a kernel for their product
        scales = a.scale, b.scale
    else:
        scales = a.scale * b.scale, 1.0
    scale_a, scale_b = (_number(s, left.device) for s in scales)
    return matmul(left, right.mT, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype)


def _number(scale: float | Tensor, device: torch.device) -> Tensor | None:
    """Convert a scale to the type that `matmul` expects; None for 1."""
    if isinstance(scale, Tensor):
        return scale
    return None if scale == 1.0 else torch.full((), scale, device=device)


def _bounded(size: Tensor) -> Tensor:
    return size.clamp(min=_SMALLEST).add(size, alpha=0)  # a constant NaN keeps torch.compile from merging equal casts


def _update_history(largest: Tensor, history: Tensor | None) -> Tensor:
    """Return the largest magnitude in earlier calls, and replace the oldest entry of the history by `largest`."""
    assert history is not None, "`use_recipe` makes it"
    before = history.amax()
    history.copy_(torch.cat([largest.view(1), history[:-1]]))
    return before


def random_signs(device: torch.device) -> Tensor:
    """Signs for the rotation of MS-EDEN, ±1 in float32."""
    return torch.randint(0, 2, (_EDEN_SIZE,), device=device).float().mul_(2).sub_(1)


def _rotated(x: Tensor, cast: OperandCast, signs: Tensor | None) -> Tensor:
    """Multiply runs of elements along the last axis by a Hadamard matrix with signed rows, which is orthonormal."""
    matrix = torch.tensor(_hadamard(_HADAMARD), dtype=x.dtype, device=x.device)
    rows = torch.tensor(_SIGNS, dtype=x.dtype, device=x.device) if signs is None else signs.to(x.dtype)
    if cast.scale == "ms-eden":  # a compiler would take minutes over a list of all its elements
        matrix = torch.kron(torch.tensor(_hadamard(_EDEN_SIZE // _HADAMARD), dtype=x.dtype, device=x.device), matrix)
    return (x.reshape(-1, len(matrix)) @ (matrix * rows.unsqueeze(-1))).view(x.shape)


def _hadamard(size: int) -> list[list[float]]:
    """The orthonormal Hadamard matrix of Sylvester's construction, for a power of two."""
    return [[(-1) ** (i & j).bit_count() / size**0.5 for j in range(size)] for i in range(size)]


def _encode_blocks(x: Tensor, cast: OperandCast, signs: Tensor | None) -> Coded:
    """Encode `x` (…, R, C), padded with zeros to whole blocks, or to whole rotations of MS-EDEN.

    Eight bits: codes with scales (…, R, blocks). Four bits: values in bfloat16, with the tensor's scale.
    """
    spec, size, num_rows = cast.spec, OPERAND_BLOCKS[cast.scale], x.shape[-2]
    is_eden = cast.scale == "ms-eden"
    missing = (-x.shape[-1] % (_EDEN_SIZE if is_eden else size), -num_rows % size if cast.square else 0)
    if any(missing):
        x = F.pad(x, (0, missing[0], 0, missing[1]))
    if cast.rotated or is_eden:
        x = _rotated(x, cast, signs)
    blocks = x.float().reshape(*x.shape[:-1], -1, size)
    largest = blocks.abs().amax(-1)
    if cast.square:
        tiles = largest.view(*largest.shape[:-2], -1, size, largest.shape[-1])
        largest = tiles.amax(-2).repeat_interleave(size, -2)
    scale, inverse, tensor_scale = (_mx_scales if cast.scale == "mx" else _nvfp4_scales)(largest, cast)
    if spec.bits == 8:
        return Coded(scaled_codes(blocks, inverse.unsqueeze(-1), spec, saturate=True).view(x.shape), scale)
    rounded = _round_(blocks * inverse.unsqueeze(-1), cast)
    if is_eden:
        scale = _unbiased_scale(blocks * inverse.unsqueeze(-1), rounded, scale)
    values = rounded.mul_(scale.unsqueeze(-1))
    if cast.scale == "four-six":
        values = _four_or_six(blocks, values, scale, tensor_scale, cast)
    return Coded(values.to(torch.bfloat16).view(x.shape)[..., :num_rows, :], tensor_scale)


def _unbiased_scale(x: Tensor, rounded: Tensor, scale: Tensor) -> Tensor:
    """Scales of blocks times ‖x‖² / x·rounded, rounded stochastically to e4m3fn (arXiv 2601.22813, algorithm 1).

    Over random rotations, x·rounded / ‖x‖² is the part of x that rounding to nearest keeps; the correction undoes that,
    exactly only for rotations of unlimited size.
    """
    overlap = (x * rounded).sum(-1)
    correction = torch.where((overlap == 0) | (scale == 0), 1.0, x.square().sum(-1) / overlap)
    return fake_quantise(scale * correction, get_format("e4m3fn"), rounding="stochastic")


def _four_or_six(x: Tensor, at_six: Tensor, scale: Tensor, tensor_scale: float | Tensor, cast: OperandCast) -> Tensor:
    """The values of each block at its scale, or at 1.5 times that if their squared error is smaller."""
    larger = (1.5 * scale).to(torch.float8_e4m3fn).float()
    inverse = (1 / (larger * tensor_scale)).clamp(max=torch.finfo(torch.float32).max)
    at_four = _round_(x * inverse.unsqueeze(-1), cast).mul_(larger.unsqueeze(-1))
    errors = ((values * tensor_scale - x).square().sum(-1, keepdim=True) for values in (at_four, at_six))
    return torch.where(torch.lt(*errors), at_four, at_six)


def _round_(x: Tensor, cast: OperandCast) -> Tensor:
    """`fake_quantise` of float32 `x`, in place, in a third of its passes; -0 may become 0."""
    spec = cast.spec
    x.clamp_(-spec.max, spec.max)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=spec.min_normal)
    if cast.rounding == "nearest":  # by addition, see `kernels.quantise`
        shift = power.mul_(1.5 * 2.0 ** (23 - spec.mantissa_bits))
        return x.add_(shift).sub_(shift)
    step = power.mul_(2.0**-spec.mantissa_bits)
    return x.div_(step).add_(torch.rand_like(x)).floor_().mul_(step).clamp_(max=spec.max)


def _mx_scales(largest: Tensor, cast: OperandCast) -> tuple[Tensor, Tensor, float]:
    """Scales of blocks, their inverses, and 1. Stochastic rounding is unbiased only if nothing is clipped."""
    if cast.rounding == "stochastic":
        scale = pow2_ceil(largest / cast.spec.max)
    else:
        scale = pow2_floor(largest) * 2.0**-cast.spec.max_exponent
    scale = scale.clamp(min=2.0**-126)
    return scale, 1 / scale, 1.0


def _nvfp4_scales(largest: Tensor, cast: OperandCast) -> tuple[Tensor, Tensor, float | Tensor]:
    """Scales of blocks in e4m3fn, the factors before the cast, and the scale of the tensor.

    In the order of TransformerEngine's reference, so that bits agree: with amax the largest magnitude, the factor of
    the tensor is f = 448 · 6 / amax, that of a block 1 / (e4m3fn(amax_block · f / 6) / f). four-six and ms-eden have
    other numbers instead of 448 and 6.
    """
    top_scale = _LARGEST_SCALE if cast.scale in ("four-six", "ms-eden") else _E4M3_MAX
    top = _EDEN_MAX if cast.scale == "ms-eden" else cast.spec.max
    limit, factor, tensor_scale = top_scale * top, torch.ones((), device=largest.device), None
    if cast.scale != "nvfp4-static" and largest.numel():
        amax = largest.amax().clamp(min=_SMALLEST)
        amax.add_(amax, alpha=0)  # Inf becomes NaN
        factor, tensor_scale = torch.full_like(amax, limit) / amax, amax / limit
    scale = (largest * (factor * (1 / top))).clamp(max=top_scale).to(torch.float8_e4m3fn).float()
    inverse = (1 / (scale * (1 / factor))).clamp_(max=torch.finfo(torch.float32).max)
    return scale, inverse, 1.0 if tensor_scale is None else tensor_scale


def block_values(x: Coded) -> Tensor:
    """The values in bfloat16 of codes with a scale per block."""
    assert isinstance(x.scale, Tensor), "blocks have scales"
    values = decode(x.codes, torch.bfloat16).view(*x.scale.shape, -1)
    return (values * x.scale.to(torch.bfloat16).unsqueeze(-1)).view(x.codes.shape)
