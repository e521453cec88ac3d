"""Codes of a block with one scale or a scale per tile, one byte or word per element: encoding, decoding, reference.

A scale is a number, or an fp32 tensor that broadcasts to the shape from `rows_of`: [rows, 1], [rows, tiles, 1] or, if
tiles do not divide rows, [rows, cols].

*Tables.* There are only 65,536 16-bit numbers, so their codes of at most 8 bits are looked up. The encoder fills the
table, so lookups give its very bits. An entry is the encoding error in fp32, whose lowest byte is 0 if scales are
powers of two or have few bits; that byte stores the code. One gather then gives both. If each tile has its scale, a
number is looked up in the table of that scale: the scales of a weight are a few neighbouring powers of two, or such
e4m3fn numbers over one power of two, and their tables are concatenated.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lpconv.formats.cast import cast
from lpconv.formats.codes import encode_narrow_, num_zero_codes
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.blocks import Workspace, as_float32, block_error, buffer_view, error_of, num_zeros, same_numbers
from lpconv.forms.facts import BlockError, BlockStats, checked_ranges
from lpconv.forms.planes import PACKED, fill, stored_numbers
from lpconv.kernels.decode import decode as decode_fp8

_REACH = 1.25  # numbers reach up to this multiple of the largest code in 4-bit and integer formats; see `tile_scales`
_LEAST_ELEMENTS = 2**15  # smallest block for which a table pays off
_CODE = 0xFF
_MANTISSA_BITS = FORMATS["fp32"].mantissa_bits
_MANTISSA = (1 << _MANTISSA_BITS) - 1
# Mantissa bits of scales: tables are added in steps of the first number, up to the second.
_BY_BITS = {0: (8, 32), FORMATS["e4m3fn"].mantissa_bits: (32, 64)}
# Concatenated tables and, if there are several, the first entry of each tile's table, which broadcasts like scales.
_Tables = tuple[Tensor, Tensor | None]
# A function of dtype, scale and format to a table that is indexed by the bit patterns of all numbers of the dtype.
_TableOf = Callable[[torch.dtype, float, Format], Tensor | None]
# The scales that have tables: (bits of the lowest one, shifted right; number of scales; the shift).
_Span = tuple[int, int, int]


def rows_of(x: Tensor, scale: float | Tensor) -> Tensor:
    """A 1-D block, unchanged for one scale, as rows for a tensor of scales."""
    return x if isinstance(scale, float) else x.view(*scale.shape[:-1], -1)


def encode(
    x: Tensor, scale: float | Tensor, fmt: Format, work: Workspace, stats: BlockStats
) -> tuple[Tensor, BlockError]:
    """The codes of one block of x / scale, in the workspace, and their error against x.

    `x` is 1-D of any floating dtype, the codes are 1-D of the format's dtype, or bytes as in `encode_narrow_`. `stats`
    are the whole tensor's: with NaN or Inf, NaN stays NaN, and Inf stays Inf or becomes NaN in formats without Inf,
    never a usable number.
    """
    codes = buffer_view(work.root, x.numel(), _dtype(fmt))
    is_short = x.itemsize == 2 and codes.itemsize == 1 and x.numel() >= _LEAST_ELEMENTS
    is_within = isinstance(scale, Tensor) or stats.absmax <= fmt.max * scale
    tables = _tables(_table, x.dtype, scale, fmt) if is_short and is_within and stats.is_finite else None
    if tables is not None:
        zeros = num_zeros(x)  # counted while x is in the cache
        entries = _look_up(x, tables, codes, work)
        flushed = _num_zeros(codes, fmt) - zeros
        errors = entries.bitwise_and_(~_CODE).view(torch.float32)
        return codes, error_of(errors, lambda: as_float32(x, work), num_flushed=flushed)
    value = as_float32(x, work)
    got = _round_to_codes(value, scale, fmt, codes, work, is_finite=stats.is_finite)
    flushed = 0
    if codes.itemsize == 1 and stats.is_finite:
        flushed = _num_zeros(codes, fmt) - num_zeros(x if x.itemsize == 2 else value)
    return codes, block_error(value, got, num_flushed=flushed)


def decode(codes: Tensor, scale: float | Tensor, packed: str = "", *, out: Tensor | None = None) -> Tensor:
    """codes · scale in fp32, 1-D; `codes` has the dtype of a format that scaled checkpoints use, or is `packed`.

    `packed` is a format in `PACKED`.
    """
    if packed:
        kind, plus, _ = PACKED[packed]
        value = stored_numbers(codes.view(1, -1), kind, 1).view(-1)
        value = value.add_(plus) if plus else value
        rows_of(value, scale).mul_(scale)
        return value
    if out is None:
        out = torch.empty(codes.shape)
    if codes.dtype == torch.float32 and isinstance(scale, float):
        return torch.mul(codes, scale, out=out)
    value = decode_fp8(codes, torch.float32, out=out) if codes.dtype.itemsize == 1 else out.copy_(codes)
    rows_of(value, scale).mul_(scale)
    return value


def decode_to(out: Tensor, codes: Tensor, scale: float | Tensor, packed: str = "") -> Tensor:
    """`decode` into `out`, rounded to its dtype.

    8-bit floats and e2m1 are exact in 16 bits, and their products with a scale that is exact too are rounded once
    either way, since torch multiplies 16-bit numbers in fp32.
    """
    if out.dtype == torch.float32 and not packed:
        return decode(codes, scale, out=out)
    short = scale.to(out.dtype) if isinstance(scale, Tensor) else scale
    is_cut = isinstance(scale, Tensor) and not torch.equal(scale.to(out.dtype).float(), scale)
    is_short = packed == "e2m1" if packed else codes.dtype.itemsize == 1
    if is_cut or not is_short or out.dtype.itemsize != 2:
        return out.copy_(decode(codes, scale, packed))
    fill(out.view(1, -1), codes.view(1, -1), packed or "fp8")
    rows_of(out, scale).mul_(short)
    return out


def reference_values(value: Tensor, scale: float | Tensor, fmt: Format) -> Tensor:
    """Rounded values of fp32 numbers (1-D) by the slow reference.

    bf16 numbers are looked up in a table of all bf16 numbers, if there are few scales (`_span_of_scales`).
    """
    if int(np.bitwise_or.reduce(value.numpy().view(np.int32))) & 0xFFFF:
        return _reference(value, scale, fmt)
    tables = _tables(_rounded, torch.bfloat16, scale, fmt)
    if tables is None:
        return _reference(value, scale, fmt)
    table, begin = tables
    patterns = (value.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    if begin is not None:
        rows_of(patterns, scale).add_(begin)
    return table.index_select(0, patterns)


def all_match_reference(tensors: Sequence[tuple[Tensor, Tensor, Tensor]], fmt: Format) -> bool:
    """Whether small tensors, as (fp32 numbers, decoded values, rows of scales), all match the slow reference.

    All rows have the same number of elements, and of scales.
    """
    value, got, scales = map(torch.cat, zip(*tensors, strict=True))
    return same_numbers(got, _reference(value, scales, fmt))


def are_reference_codes(x: Tensor, codes: Tensor, scale: float | Tensor, fmt: Format, work: Workspace) -> bool:
    """Whether 8-bit codes of a block of 16-bit numbers are those of the slow reference, by table lookup.

    False proves nothing: tables do not cover all scales, numbers and formats.
    """
    if x.itemsize != 2 or x.numel() < _LEAST_ELEMENTS or codes.itemsize != 1 or codes.dtype == torch.uint8:
        return False
    tables = _tables(_reference_codes, x.dtype, scale, fmt)
    if tables is None:
        return False
    table, begin = tables
    right = torch.index_select(
        table, 0, _table_indices(x, begin, work), out=buffer_view(work.residual, x.numel(), torch.uint8)
    )
    return np.array_equal(right.numpy(), codes.view(torch.uint8).numpy())


@functools.lru_cache(maxsize=32)
def _reference_codes(dtype: torch.dtype, scale: float, fmt: Format) -> Tensor:
    """The reference codes, as bytes, of all numbers of a 16-bit dtype; the NaN code if no finite code is right."""
    assert fmt.nan_code is not None, fmt.name
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(_dtype(fmt))
    codes = codes[codes.float().isfinite()]
    decoded, order = decode(codes, scale).view(torch.int32).sort()
    bits = _rounded(dtype, scale, fmt).view(torch.int32)
    at = torch.searchsorted(decoded, bits).clamp_(max=len(decoded) - 1)
    return torch.where(decoded[at] == bits, codes.view(torch.uint8)[order][at], fmt.nan_code)


@functools.lru_cache(maxsize=8)
def _rounded(dtype: torch.dtype, scale: float, fmt: Format) -> Tensor:
    """The slow reference's values of all numbers of a 16-bit dtype."""
    return _reference(_all_numbers(dtype), scale, fmt)


def _reference(value: Tensor, scale: float | Tensor, fmt: Format) -> Tensor:
    cols = 1 if isinstance(scale, float) or not len(scale) else value.numel() // len(scale)
    done = torch.empty_like(value)
    for start, stop in checked_ranges(value.numel(), cols):
        part = scale if isinstance(scale, float) else scale[start // cols : stop // cols]
        unit = rows_of(value[start:stop], part) / part
        least, largest = float(unit.amin()), float(unit.amax())  # the rare cases below take most of the time
        if not fmt.has_inf and not (math.isfinite(least) and math.isfinite(largest)):
            unit.masked_fill_(torch.isinf(unit), math.nan)
        rounded = cast(unit, fmt, overflow="inf" if fmt.has_inf else "saturate")
        if fmt.twos_complement and not least > -fmt.max - 0.5:
            # Two's complement has one more negative number, to which `cast` does not round; the tie is even.
            rounded = torch.where(unit <= -fmt.max - 0.5, -fmt.max - 1, rounded)
        done[start:stop] = (rounded * part).view(-1)
    return done


def _round_to_codes(
    value: Tensor, scale: float | Tensor, fmt: Format, codes: Tensor, work: Workspace, *, is_finite: bool
) -> Tensor:
    """Write the codes of fp32 numbers into `codes` and return their values."""
    count = value.numel()
    coded = codes if codes.dtype == torch.float32 else work.scratch.coded[:count]
    # Powers of two have an exact reciprocal; division is right for every scale but slower.
    if isinstance(scale, float) and math.frexp(scale)[0] == 0.5:
        torch.mul(value, 1 / scale, out=coded)
    else:
        torch.div(rows_of(value, scale), scale, out=rows_of(coded, scale))
    if codes.dtype == torch.uint8:
        encode_narrow_(coded, fmt, codes, (work.scratch.error[:count], work.residual[:count]))
        rows_of(coded, scale).mul_(scale)
        return coded
    if not is_finite and not fmt.has_inf:
        coded.masked_fill_(torch.isinf(coded), math.nan)
    if coded is not codes:
        codes.copy_(coded)
    return decode(codes, scale, out=work.scratch.error[:count])


def _tables(table_of: _TableOf, dtype: torch.dtype, scale: float | Tensor, fmt: Format) -> _Tables | None:
    """The lookup tables for 16-bit numbers, or None if there are none for these scales."""
    if isinstance(scale, float):
        entries = table_of(dtype, scale, fmt)
        return None if entries is None else (entries, None)
    span = _span_of_scales(scale)
    entries = None if span is None else _joined(table_of, dtype, fmt, span)
    if span is None or entries is None:
        return None
    first, _, dropped = span
    return entries, (scale.view(torch.int32) >> dropped).sub_(first).mul_(2**16)


@functools.lru_cache(maxsize=6)
def _joined(table_of: _TableOf, dtype: torch.dtype, fmt: Format, span: _Span) -> Tensor | None:
    """The concatenated tables for the scales of a span."""
    first, count, dropped = span
    scales = (np.arange(first, first + count, dtype=np.int32) << dropped).view(np.float32).tolist()
    candidates = [table_of(dtype, scale, fmt) for scale in scales]
    tables = [t for t in candidates if t is not None]
    return torch.cat(tables) if len(tables) == len(candidates) else None


@functools.lru_cache(maxsize=32)
def _table(dtype: torch.dtype, scale: float, fmt: Format) -> Tensor | None:
    """Codes of all numbers of a 16-bit dtype with their errors, or None if both do not fit one word.

    The code takes the lowest byte of the error, which must be 0 for all numbers that are used. The errors of numbers
    beyond the format's range are not accurate to the last bit.
    """
    values = _all_numbers(dtype)
    codes = torch.empty(len(values), dtype=_dtype(fmt))
    got = _round_to_codes(values, scale, fmt, codes, Workspace(), is_finite=True)
    used = values.abs() <= _REACH * (fmt.max + fmt.twos_complement) * scale
    bits = (got - values).view(torch.int32)
    return None if (bits[used] & _CODE).any() else bits & ~_CODE | codes.view(torch.uint8)


def _dtype(fmt: Format) -> torch.dtype:
    """The dtype of codes in memory, one per element."""
    dtype: torch.dtype = getattr(torch, fmt.torch) if fmt.safetensors and fmt.torch else torch.uint8
    return dtype


def _num_zeros(codes: Tensor, fmt: Format) -> int:
    return num_zero_codes(codes, fmt) if codes.dtype == torch.uint8 else num_zeros(codes)


@functools.lru_cache(maxsize=2)
def _all_numbers(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype in fp32, indexed by bit pattern."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float()


def _span_of_scales(scales: Tensor) -> _Span | None:
    """The span of tables for these fp32 scales; None if they have too many bits or are too far apart."""
    bits = scales.numpy().view(np.int32)
    any_bits = int(np.bitwise_or.reduce(bits, axis=None)) & _MANTISSA if bits.size else _MANTISSA
    for num_bits, (step, most) in _BY_BITS.items():
        dropped = _MANTISSA_BITS - num_bits
        if not any_bits & (1 << dropped) - 1:
            low, high = int(bits.min()), int(bits.max())
            first = (low >> dropped) // step * step
            count = ((high >> dropped) // step + 1) * step - first
            is_normal = low >> _MANTISSA_BITS > 0 and high >> _MANTISSA_BITS < 0xFF
            return (first, count, dropped) if is_normal and count <= most else None
    return None


def _table_indices(x: Tensor, begin: Tensor | None, work: Workspace) -> Tensor:
    """Table indices of 16-bit numbers, 1-D; `begin` is the first entry of each tile's table.

    They use the buffer of fp32 numbers, so that the used part of a workspace nearly fits a core's own cache.
    """
    indices = work.scratch.value[: x.numel()].view(torch.int32).copy_(x.view(torch.uint16))
    if begin is not None:
        indices.view(*begin.shape[:-1], -1).add_(begin)
    return indices


def _look_up(x: Tensor, tables: _Tables, codes: Tensor, work: Workspace) -> Tensor:
    """Write the codes of a block, 1-D, into `codes`, and return the table entries, which also have the errors."""
    entries_of_tables, begin = tables
    out = work.scratch.error[: x.numel()].view(torch.int32)
    entries = torch.index_select(entries_of_tables, 0, _table_indices(x, begin, work), out=out)
    codes.view(torch.uint8).copy_(entries)  # the lowest byte of each
    return entries
