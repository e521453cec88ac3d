"""Codes: the bit patterns of a format's numbers, packed if a code is shorter than a byte.

A format of 8 bits or more is stored as its torch dtype (tf32, which has none, as float32). Shorter codes are packed
along the last axis without gaps, the first in the lowest bits of the first byte: two of 4 bits to a byte, like torch's
`float4_e2m1fn_x2`, four of 6 bits to three bytes, eight of 3 bits to three.

`nearest_` and `encode_narrow_` round on a CPU to formats of few bits, in place and several times faster. Integers are
stored unsigned there, biased by half of their range, as other tools pack them into words. Rounding adds and subtracts
1.5 · 2^23 steps: next to that, float32 has no bits for less than a step. The lowest byte of the sum is the number of
steps and is read from the bits, since torch casts float32 to bytes one by one.
"""

import numpy as np
import torch
from torch import Tensor

from lpconv.errors import InputError, UsageError
from lpconv.formats.cast import Overflow, Rounding, cast
from lpconv.formats.spec import FORMATS, Format, get_format, per_group

_FP32_BITS = FORMATS["fp32"].mantissa_bits
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


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
    return pack(codes.reshape(-1), spec.storage_bits).view(code_dtype(spec)).reshape(shape)


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
    num_codes, num_bytes = per_group(spec.storage_bits)
    if codes.shape[-1:].numel() % num_bytes or codes.ndim == 0:
        raise UsageError(
            f"{spec.name} packs {num_codes} codes into {num_bytes} bytes; shape {tuple(codes.shape)} does not fit"
        )
    unpacked = unpack(codes.contiguous().view(torch.uint8).reshape(-1), spec.storage_bits)
    return table[unpacked.int()].reshape(*codes.shape[:-1], codes.shape[-1] // num_bytes * num_codes)


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
    if spec.storage_bits >= 8:
        return tuple(shape)
    codes, num_bytes = per_group(spec.storage_bits)
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


def pack(codes: Tensor, bits: int, spare: Tensor | None = None) -> Tensor:
    """Pack codes (1-D bytes below 2^bits) without gaps, the first in the lowest bits; they must fill whole bytes.

    Neighbours are joined to words of two, four and eight codes, until the used bits of a word are whole bytes. `spare`
    is a buffer of twice as many bytes, which the result may use.
    """
    num_codes, num_bytes = per_group(bits)
    words, size = codes, codes.numel()
    spare = codes.new_empty(2 * size) if spare is None else spare
    for count in (1, 2, 4)[: num_codes.bit_length() - 1]:
        pairs = words.view(_WORDS[2 * count])
        upper = torch.bitwise_right_shift(pairs, 8 * count, out=spare[size : 2 * size].view(pairs.dtype))
        words = torch.sub(
            pairs, upper, alpha=(1 << 8 * count) - (1 << bits * count), out=spare[:size].view(pairs.dtype)
        )
    if num_bytes == 1:
        return words.to(torch.uint8)  # three times faster
    return words.view(torch.uint8).view(-1, num_codes)[:, :num_bytes].contiguous().view(-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes, one per byte, of packed ones (1-D bytes), which are whole groups (`per_group`); inverts `pack`."""
    num_codes, num_bytes = per_group(bits)
    if num_codes == 1:
        return packed
    words = packed.new_zeros(packed.numel() // num_bytes, num_codes)
    words[:, :num_bytes] = packed.view(-1, num_bytes)
    words = words.view(-1)
    for count in (4, 2, 1)[3 - (num_codes.bit_length() - 1) :]:
        words = words.view(_WORDS[2 * count])
        words.add_(words >> bits * count, alpha=(1 << 8 * count) - (1 << bits * count))
    return words.view(torch.uint8)


def nearest_(x: Tensor, element: Format) -> Tensor:
    """Round finite float32 to a format of at most 8 bits like `cast`, in place; zeros may lose their sign."""
    shift = _rounding_shift(x.clamp_(-element.max, element.max), element, torch.empty_like(x))
    return x.add_(shift).sub_(shift)


def nearest_code_(x: Tensor, element: Format) -> Tensor:
    """Round like `nearest_`, in place, but let integers use all their codes, including the lowest."""
    if not element.twos_complement:
        return nearest_(x, element)
    return x.round_().clamp_(-element.max - 1, element.max)


def encode_narrow_(x: Tensor, element: Format, codes: Tensor, spare: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Round finite float32 (1-D) to e2m1 or integers in place, write one code per byte into `codes`, and return `x`.

    Codes are those of `encode`, but integers are stored plus half of their range (n + 8 of int4), and numbers nearest
    to the lowest (-8) keep that value. Zeros lose their sign in `x`, not in the codes. `spare` are optional buffers of
    that size, one float32 and one uint8.
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


def _rounding_shift(x: Tensor, element: Format, out: Tensor) -> Tensor:
    """1.5 · 2^23 steps of each number's binade; adding and subtracting them rounds a number within the range."""
    power = torch.bitwise_and(x.view(torch.int32), 0x7F800000, out=out.view(torch.int32)).view(torch.float32)
    return power.clamp_min_(element.min_normal).mul_(1.5 * 2.0 ** (_FP32_BITS - element.mantissa_bits))


def _half(element: Format) -> int:
    """The sign bit, which is also the bias that makes integer codes non-negative."""
    return 1 << (element.bits - 1)
