"""Passes of an fp8 training step on a CPU, each compiled into one kernel, for large bfloat16 matrices.

In eager mode each is a chain of operations over pieces that stay in the cache; a compiled pass reads and writes once.
Compiled code for 16-bit numbers stalls when their bits are viewed as another type, so values are rounded in pairs: two
bfloat16 numbers are one int32, and each half of it, moved to the top, is the same number in float32. Factors are always
given per row and per column, even if one of them is constant, since a product with 1 is exact; so one compiled kernel
serves every scale.

Each function takes tensors on a CPU, and returns None if its kernel does not apply or has changed a bit
(`CheckedKernel`): its callers have a fallback.
"""

import functools
import math

import torch
from torch import Tensor

from lpconv.formats.codes import code_dtype
from lpconv.formats.spec import FORMATS, Format, get_format
from lpconv.kernels.compiled import CheckedKernel

_BF16, _INT32, _SAVED = torch.bfloat16, torch.int32, get_format("e4m3fn")
_SIGNS = -0x7FFF8000  # 0x80008000, the signs of both halves
_REPEATS = 32  # of an example: the compiler uses threads only for 512 or more rounds each


def fused_values(x: Tensor, inverse: Tensor, spec: Format, out: Tensor) -> Tensor | None:
    """The values of `fused_codes`, written to `out` in bfloat16; `spec` is any fp8 format with -0."""
    if not _fits_pairs(_VALUES, x) or inverse.dtype != torch.float32 or not spec.has_negative_zero:
        return None
    row, column = _factors(inverse, x)
    even, odd = column[::2].contiguous(), column[1::2].contiguous()
    _VALUES(x.view(_INT32), out.view(_INT32), row, even, odd, *_step(spec))
    return out


def fused_codes(x: Tensor, inverse: Tensor, spec: Format) -> Tensor | None:
    """Codes of x (R, C) · `inverse`, a float32 number, (R, 1) or (1, C); no product may round beyond the range."""
    if not _fits(_CODES, x) or spec != _SAVED or inverse.dtype != torch.float32:
        return None
    return _CODES(x, torch.empty_like(x, dtype=code_dtype(spec)), *_factors(inverse, x))


def fused_decode(codes: Tensor, spec: Format, out: Tensor) -> Tensor | None:
    """The values of finite `codes` of the fp8 format `spec`, written to `out` in bfloat16; both contiguous."""
    if codes.numel() % 4 or codes.storage_offset() % 4 or out.storage_offset() % 4 or not _DECODE.wants(codes, _INT32):
        return None
    _DECODE(codes.view(torch.uint8).view(-1).view(_INT32), out.view(-1).view(torch.int64), *_place(spec))
    return out


def fused_largest(x: Tensor, axis: int) -> Tensor | None:
    """The largest magnitudes along `axis`, -1 or -2, of bfloat16 x (R, C): (R,) or (C,), NaN if there is one."""
    if axis == -1:
        return _ROWS(x, x.new_empty(len(x))) if _fits(_ROWS, x) else None
    if not _fits_pairs(_COLUMNS, x):
        return None
    out = x.new_empty(x.shape[1])
    _COLUMNS(x.view(_INT32), out.view(_INT32))
    return out


def fused_product_(out: Tensor, rows: Tensor, columns: Tensor) -> Tensor | None:
    """Multiply `out` (R, C) by `rows` and `columns` in place; both are float32 numbers, or (R, 1) and (1, C)."""
    shapes = (len(out), 1), (1, out.shape[1])
    if not _fits(_PRODUCT, out) or rows.shape not in ((), shapes[0]) or columns.shape not in ((), shapes[1]):
        return None
    return _PRODUCT(out, _expand(rows, shapes[0]), _expand(columns, shapes[1]))


def fused_transpose(x: Tensor, out: Tensor) -> Tensor | None:
    """Copy x (R, C), whose transpose is contiguous, to the contiguous `out`."""
    return _TURN(x.t(), out) if _fits(_TURN, x.t()) else None


def _fits(kernel: CheckedKernel, x: Tensor, dtype: torch.dtype | None = None) -> bool:
    is_matrix = x.dtype == _BF16 and x.dim() == 2 and x.is_contiguous() and min(x.shape) > 1
    return is_matrix and kernel.wants(x, dtype)


def _fits_pairs(kernel: CheckedKernel, x: Tensor) -> bool:
    return _fits(kernel, x, _INT32) and x.shape[1] % 2 == 0 and x.storage_offset() % 2 == 0


def _factors(factor: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of x (R, C): per row (R, 1) and per column (C,)."""
    rows, columns = (len(x), 1), x.shape[1:]
    if factor.dim() and factor.shape[0] == 1:
        return torch.ones(rows), _expand(factor, columns)
    return _expand(factor, rows), torch.ones(columns)


def _expand(factor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape).copy_(factor.view(shape) if factor.dim() else factor)


@functools.cache
def _step(spec: Format) -> tuple[Tensor, Tensor]:
    """Factor of a number's power of two that leaves no bits for less than one step, and the smallest such power."""
    magic = 1.5 * 2.0 ** (FORMATS["fp32"].mantissa_bits - spec.mantissa_bits)
    return torch.tensor(magic), torch.tensor(spec.min_normal)


def _values(x: Tensor, out: Tensor, row: Tensor, even: Tensor, odd: Tensor, magic: Tensor, floor: Tensor) -> Tensor:
    low = _round_bits((x << 16).view(torch.float32) * row * even, magic, floor)
    high = _round_bits((x & -0x10000).view(torch.float32) * row * odd, magic, floor)
    return out.copy_((high & -0x10000) | ((low >> 16) & 0xFFFF) | (x & _SIGNS))


def _round_bits(y: Tensor, magic: Tensor, floor: Tensor) -> Tensor:
    """The bits of `y` rounded to nearest even, as in `quantise`: the sum has no bits for less than one step."""
    power = (y.view(_INT32) & 0x7F800000).view(torch.float32)
    shift = torch.maximum(power, floor) * magic
    return ((y + shift) - shift).view(_INT32)


def _codes(x: Tensor, out: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return out.copy_((x.float() * row * column).to(out.dtype))


@functools.cache
def _place(spec: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The shift of a code from the top byte to its place in float32, its mask there, and the factor of its value."""
    fp32 = FORMATS["fp32"]
    mask = 0x7F << (fp32.mantissa_bits - spec.mantissa_bits)
    return (
        torch.tensor(1 + spec.mantissa_bits, dtype=_INT32),
        torch.tensor(mask, dtype=_INT32),
        torch.tensor(2.0 ** (fp32.bias - spec.bias)),
    )


def _decode(codes: Tensor, out: Tensor, down: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """Decode the four codes in each int32; the first is in the lowest byte."""

    def bits(code: Tensor) -> Tensor:
        return (((((code >> down) & mask) | (code & -0x80000000)).view(torch.float32)) * factor).view(_INT32)

    low = (bits(codes << 16) & -0x10000) | ((bits(codes << 24) >> 16) & 0xFFFF)
    high = (bits(codes) & -0x10000) | ((bits(codes << 8) >> 16) & 0xFFFF)
    return out.copy_((low.long() & 0xFFFFFFFF) | (high.long() << 32))


def _rows(x: Tensor, out: Tensor) -> Tensor:
    return out.copy_(x.abs().amax(-1))


def _columns(x: Tensor, out: Tensor) -> Tensor:
    """Largest magnitudes by column: without signs, float bit patterns have the order of their values, with NaN last."""
    return out.copy_((x & 0x7FFF).amax(0) | (x & 0x7FFF0000).amax(0))


def _product(out: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return out.copy_((out.float() * row * column).to(out.dtype))


def _turn(x: Tensor, out: Tensor) -> Tensor:
    out.t().copy_(x)  # compiled, this writes rows and reads columns, twice as fast as the other way round
    return out


def _example() -> tuple[Tensor, Tensor, Tensor]:
    """Ties, subnormals, both zeros, the largest number and non-finite ones; with factors that are not powers of two."""
    steps = torch.arange(-480, 480) / 16
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
    row = torch.cat([steps, steps * 2.0**-9, steps * 14.9, special.repeat(8)]).to(_BF16)
    rows, columns = torch.tensor([1.0, 0.37, 1.0]).repeat(_REPEATS)[:, None], torch.ones(len(row))
    columns[::3] = 0.73
    return row.repeat(len(rows), 1), rows, columns


def _values_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    x, row, column = _example()
    even, odd = column[::2].contiguous(), column[1::2].contiguous()
    return x.view(_INT32), torch.empty_like(x).view(_INT32), row, even, odd, *_step(_SAVED)


def _codes_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    x, *factors = _example()
    return x, torch.empty_like(x, dtype=code_dtype(_SAVED)), *factors


def _decode_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    codes = torch.arange(256).to(torch.uint8).repeat(64 * _REPEATS)
    return codes.view(_INT32), torch.empty(len(codes), dtype=_BF16).view(torch.int64), *_place(_SAVED)


def _rows_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    x = _example()[0]
    x = torch.cat([x, x.where(x.isfinite(), 0)])
    return x, x.new_empty(len(x))


def _columns_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    x, rows, _ = _example()
    x = x * rows.to(_BF16)
    return x.view(_INT32), x.new_empty(x.shape[1]).view(_INT32)


def _turn_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    x = _example()[0]
    return x, x.new_empty(x.t().shape)


_VALUES = CheckedKernel(_values, _values_example)
_CODES = CheckedKernel(_codes, _codes_example)
_DECODE = CheckedKernel(_decode, _decode_example)
_ROWS = CheckedKernel(_rows, _rows_example)
_COLUMNS = CheckedKernel(_columns, _columns_example)
_PRODUCT = CheckedKernel(_product, lambda dtype, device: _example())
_TURN = CheckedKernel(_turn, _turn_example)
