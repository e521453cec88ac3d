"""Codes: the bit patterns of a format's numbers, packed if a code is shorter than a byte.

A format of 8 bits or more is stored as its torch dtype (tf32, which has none, as float32). fp4 and int4 pack two codes
into a byte, the first in the low half, like torch's `float4_e2m1fn_x2`; fp6 packs four codes into three bytes, the
first in the lowest bits of the first byte. Codes are packed along the last axis.
"""

import torch
from torch import Tensor

from lpconv.errors import InputError, UsageError
from lpconv.formats.cast import Overflow, Rounding, cast
from lpconv.formats.spec import Format, get_format

_PER_GROUP = {4: (2, 1), 6: (4, 3)}  # bits of a code: (codes, bytes) of the smallest group that fills whole bytes


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
