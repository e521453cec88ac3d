"""Codes: the bit patterns of a format's numbers, packed if a code is shorter than a byte.

A format of 8 bits or more is stored as its torch dtype (tf32, which has none, as float32). fp4 and int4 pack two codes
into a byte, the first in the low half, like torch's `float4_e2m1fn_x2`; fp6 packs four codes into three bytes, the
first in the lowest bits of the first byte. Codes are packed along the last axis.

`nearest_`, `encode_narrow_` and `pack_nibbles` do the same on a CPU for formats of few bits, in place and several times
faster. Integers are stored unsigned there, biased by half of their range, as other tools pack them into words. Rounding
adds and subtracts 1.5 · 2^23 steps: next to that, float32 has no bits for less than a step. The lowest byte of the sum
is the number of steps and is read from the bits, since torch casts float32 to bytes one by one.
"""

import numpy as np
import torch
from torch import Tensor

from lpconv.errors import InputError, UsageError
from lpconv.formats.cast import Overflow, Rounding, cast
from lpconv.formats.spec import FORMATS, Format, get_format

_PER_GROUP = {4: (2, 1), 6: (4, 3)}  # bits of a code: (codes, bytes) of the smallest group that fills whole bytes
_FP32_BITS = FORMATS["fp32"].mantissa_bits


def encode(
    x: Tensor,
    format: str | Format,
    *,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the codes of `cast(x, ...)`, in `code_dtype(format)` and of shape `code_shape(format, x.shape)`.

    In formats of 8 bits or fewer every NaN becomes `Format.nan_code`, without a sign, since processors differ on the
    signs of NaN. Raises InputError if x has NaN and the format has none, and UsageError like `cast`, or if fp4 or fp6
    codes do not fill whole bytes.
    """
    spec = get_format(format)
    shape = code_shape(spec, x.shape)
    values = cast(x.detach(), spec, rounding=rounding, overflow=overflow, generator=generator)
    if spec.storage_bits > 8:
        return values.to(code_dtype(spec))
    if not spec.has_nan and bool(values.isnan().any()):
        raise InputError(
            f"the tensor contains NaN, for which {spec.name} has no code", hint="find where the NaN comes from"
        )
    codes = _codes(values.double(), spec)
    return _pack(codes, spec).view(code_dtype(spec)).reshape(shape)


def decode(codes: Tensor, format: str | Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the unpacked values of `codes` in `dtype`; the inverse of `encode`.

    Exact in every dtype that can represent the format's numbers. For formats of 8 bits or fewer, codes may also be
    uint8.
    """
    spec = get_format(format)
    if codes.dtype not in (code_dtype(spec), torch.uint8) or (codes.dtype == torch.uint8 and spec.storage_bits > 8):
        raise UsageError(f"{codes.dtype} is not the dtype of {spec.name} codes", hint=f"pass {code_dtype(spec)}")
    if spec.storage_bits > 8:
        return codes.to(dtype)
    table = code_values(spec).to(device=codes.device, dtype=dtype)
    return table[_unpack(codes.contiguous().view(torch.uint8), spec).int()]


def code_dtype(format: str | Format) -> torch.dtype:
    """Storage dtype of codes: the format's own dtype, uint8 for fp6 and integers, float32 for tf32."""
    spec = get_format(format)
    if spec.torch is None:
        return torch.uint8 if spec.storage_bits <= 8 else torch.float32
    dtype: torch.dtype = getattr(torch, spec.torch)
    return dtype


def code_shape(format: str | Format, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the codes of a tensor of `shape`. Raises UsageError if the last axis does not fill whole bytes."""
    spec = get_format(format)
    if spec.storage_bits not in _PER_GROUP:
        return tuple(shape)
    codes, num_bytes = _PER_GROUP[spec.storage_bits]
    if not shape or shape[-1] % codes:
        raise UsageError(
            f"{spec.name} packs groups of {codes} codes, which do not divide the last axis of {tuple(shape)}",
            hint=f"pad the last axis to a multiple of {codes}",
        )
    return (*shape[:-1], shape[-1] // codes * num_bytes)


def code_values(format: str | Format) -> Tensor:
    """Value of every code of a format of at most 8 bits, in float64: element i is the value of code i."""
    spec = get_format(format)
    codes = torch.arange(2**spec.bits)
    negative = codes >= 2 ** (spec.bits - int(spec.has_sign))
    magnitude = codes & ((1 << (spec.exponent_bits + spec.mantissa_bits)) - 1)
    if spec.twos_complement:
        magnitude = torch.where(negative, 2**spec.bits - codes, codes)
    field, mantissa = magnitude >> spec.mantissa_bits, magnitude & ((1 << spec.mantissa_bits) - 1)
    subnormal = (field == 0) & spec.has_zero
    significand = torch.where(subnormal, 0.0, 1.0).double() + mantissa * spec.eps
    exponent = torch.where(subnormal, spec.min_exponent, field - spec.bias)
    values = significand * ((exponent + 1023) << 52).view(torch.float64)
    values = torch.where(negative, -values, values)
    if spec.inf_code is not None:
        values[magnitude == spec.inf_code] *= torch.inf
        values[magnitude > spec.inf_code] = torch.nan
    elif spec.nan_code is not None:
        values[codes == spec.nan_code] = torch.nan
        if spec.has_negative_zero:
            values[magnitude == spec.nan_code] = torch.nan
    return values


def _codes(values: Tensor, spec: Format) -> Tensor:
    """The codes of numbers of the format, one per byte."""
    exponent = (((values.view(torch.int64) >> 52) & 0x7FF) - 1023).clamp(spec.min_exponent, spec.max_exponent)
    step = ((exponent - spec.mantissa_bits + 1023) << 52).view(torch.float64)
    steps = (values.abs() / step).nan_to_num(0.0, 0.0).long()  # the significand as an integer, with its hidden one
    first = spec.min_exponent if spec.has_zero else spec.min_exponent + 1
    codes = ((exponent - first) << spec.mantissa_bits) + steps
    if spec.inf_code is not None:
        codes = torch.where(values.isinf(), spec.inf_code, codes)
    negative = values.signbit() if spec.has_negative_zero else values < 0
    mirrored = (1 << spec.bits) - codes if spec.twos_complement else codes + (1 << (spec.bits - 1))
    codes = torch.where(negative, mirrored, codes)
    if spec.nan_code is not None:
        codes = torch.where(values.isnan(), spec.nan_code, codes)
    return codes.to(torch.uint8)


def _pack(codes: Tensor, spec: Format) -> Tensor:
    if spec.storage_bits == 8:
        return codes
    num_codes, num_bytes = _PER_GROUP[spec.storage_bits]
    groups = codes.reshape(-1, num_codes).long()
    words = (groups << _shifts(num_codes, spec.storage_bits, codes)).sum(-1, keepdim=True)
    return ((words >> _shifts(num_bytes, 8, codes)) & 0xFF).to(torch.uint8)


def _unpack(packed: Tensor, spec: Format) -> Tensor:
    if spec.storage_bits == 8:
        return packed
    num_codes, num_bytes = _PER_GROUP[spec.storage_bits]
    if packed.ndim == 0 or packed.shape[-1] % num_bytes:
        raise UsageError(
            f"{spec.name} packs {num_codes} codes into {num_bytes} bytes; shape {tuple(packed.shape)} does not fit"
        )
    groups = packed.reshape(-1, num_bytes).long()
    words = (groups << _shifts(num_bytes, 8, packed)).sum(-1, keepdim=True)
    codes = (words >> _shifts(num_codes, spec.storage_bits, packed)) & ((1 << spec.storage_bits) - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] // num_bytes * num_codes)


def _shifts(count: int, width: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device) * width


def nearest_(x: Tensor, element: Format) -> Tensor:
    """Round finite float32 to a format of at most 8 bits like `cast`, in place; zeros may lose their sign."""
    shift = _rounding_shift(x.clamp_(-element.max, element.max), element, torch.empty_like(x))
    return x.add_(shift).sub_(shift)


def nearest_code_(x: Tensor, element: Format) -> Tensor:
    """Round like `nearest_`, in place, but let integers use all their codes, including -8 or -128."""
    if not element.twos_complement:
        return nearest_(x, element)
    return x.round_().clamp_(-element.max - 1, element.max)


def encode_narrow_(x: Tensor, element: Format, codes: Tensor, spare: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Round finite float32 (1-D) to e2m1, int4 or int8 in place, write one code per byte into `codes`, and return `x`.

    Codes are those of `encode`, but integers are stored as n + 8 or n + 128, and numbers nearest to -8 or -128
    keep that value. Zeros lose their sign in `x`, not in the codes. `spare` are optional buffers of that size, one
    float32 and one uint8.
    """
    x.clamp_(-element.max - element.twos_complement, element.max)
    if element.twos_complement:
        bias = 1.5 * 2.0**_FP32_BITS + _half(element)
        codes.copy_(x.add_(bias).view(torch.int32))
        return x.sub_(bias)
    wide, narrow = spare or (torch.empty_like(x), torch.empty_like(codes))
    np.signbit(x.numpy(), out=narrow.view(torch.bool).numpy())  # torch takes eight times as long
    shift, dropped = _rounding_shift(x, element, wide), _FP32_BITS - element.mantissa_bits
    codes.copy_(x.add_(shift).view(torch.int32)).view(torch.int8).abs_()
    x.sub_(shift)
    codes.add_(narrow.mul_(_half(element)))
    # Add 2^mantissa_bits codes for each binade above the lowest, which subnormals share.
    codes.add_(narrow.copy_(shift.view(torch.int32).bitwise_right_shift_(dropped)))
    lowest = torch.tensor(1.5 * 2.0**dropped * element.min_normal).view(torch.int32) >> dropped
    codes.sub_(int(lowest) & 0xFF)
    return x


def num_zero_codes(codes: Tensor, element: Format) -> int:
    """Number of codes written by `encode_narrow_` that stand for zero."""
    raw = codes.numpy()
    if element.twos_complement:
        return int(np.count_nonzero(raw == _half(element)))
    return raw.size - int(np.count_nonzero(raw & (_half(element) - 1)))


def pack_nibbles(codes: Tensor, spare: Tensor | None = None) -> Tensor:
    """Pack 4-bit codes (1-D bytes) two to a byte, the first in the lower half.

    `spare` is a buffer of twice as many bytes.
    """
    pairs = codes.view(torch.int16)
    count = codes.numel()
    spare = torch.empty(2 * count, dtype=torch.uint8) if spare is None else spare
    both = torch.bitwise_right_shift(pairs, 4, out=spare[:count].view(torch.int16)).bitwise_or_(pairs)
    return spare[count : count + count // 2].copy_(both)


def _rounding_shift(x: Tensor, element: Format, out: Tensor) -> Tensor:
    """1.5 · 2^23 steps of each number's binade; adding and subtracting them rounds a number within the range."""
    power = torch.bitwise_and(x.view(torch.int32), 0x7F800000, out=out.view(torch.int32)).view(torch.float32)
    return power.clamp_min_(element.min_normal).mul_(1.5 * 2.0 ** (_FP32_BITS - element.mantissa_bits))


def _half(element: Format) -> int:
    """The sign bit, which is also the bias that makes integer codes non-negative."""
    return 1 << (element.bits - 1)
