"""Table lookup of codes of at most 8 bits for 16-bit numbers, of which there are only 65,536.

The encoder fills the table, so lookups give its very bits. An entry is the encoding error in fp32, whose lowest byte is
0 if scales are powers of two or have few bits; that byte stores the code. One gather then gives both. If each tile has
its scale, a number is looked up in the table of that scale: the scales of a weight are a few neighbouring powers of
two, or such e4m3fn numbers over one power of two, and their tables are concatenated.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS
from lpconv.forms.blocks import Workspace

LEAST_ELEMENTS = 2**15  # smallest block for which a table pays off
_CODE = 0xFF
_MANTISSA_BITS = FORMATS["fp32"].mantissa_bits
_MANTISSA = (1 << _MANTISSA_BITS) - 1
# Mantissa bits of scales: tables are added in steps of the first number, up to the second.
_BY_BITS = {0: (8, 32), FORMATS["e4m3fn"].mantissa_bits: (32, 64)}
# Concatenated tables and, if there are several, the first entry of each tile's table, which broadcasts like scales.
Tables = tuple[Tensor, Tensor | None]
# The scales that have tables: (bits of the lowest one, shifted right; number of scales; the shift).
Span = tuple[int, int, int]


@functools.lru_cache(maxsize=2)
def numbers(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype in fp32, indexed by bit pattern."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float()


def table(difference: Tensor, codes: Tensor, used: Tensor) -> Tensor | None:
    """Pack fp32 differences and their codes into one word each, indexed by bit pattern.

    The code takes the lowest byte of the difference; None if a difference that is used needs that byte.
    """
    bits = difference.view(torch.int32)
    return None if (bits[used] & _CODE).any() else bits & ~_CODE | codes.view(torch.uint8)


def span_of_scales(scales: Tensor) -> Span | None:
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


def scales_of(span: Span) -> list[float]:
    """The scales of a span in order."""
    first, count, dropped = span
    bits = np.arange(first, first + count, dtype=np.int32) << dropped
    scales: list[float] = bits.view(np.float32).tolist()
    return scales


def beginnings(scales: Tensor, span: Span) -> Tensor:
    """The first entry of each scale's table in a span."""
    first, _, dropped = span
    return (scales.view(torch.int32) >> dropped).sub_(first).mul_(2**16)


def patterns(x: Tensor, begin: Tensor | None, work: Workspace) -> Tensor:
    """Table indices of 16-bit numbers, 1-D; `begin` is the first entry of each tile's table.

    They use the buffer of fp32 numbers, so that the used part of a workspace nearly fits a core's own cache.
    """
    indices = work.scratch.value[: x.numel()].view(torch.int32).copy_(x.view(torch.uint16))
    if begin is not None:
        indices.view(*begin.shape[:-1], -1).add_(begin)
    return indices


def look_up(x: Tensor, tables: Tables, codes: Tensor, work: Workspace) -> Tensor:
    """Write the codes of a block, 1-D, into `codes`, and return the table entries, for `differences`."""
    entries_of_tables, begin = tables
    out = work.scratch.error[: x.numel()].view(torch.int32)
    entries = torch.index_select(entries_of_tables, 0, patterns(x, begin, work), out=out)
    codes.view(torch.uint8).copy_(entries)  # the lowest byte of each
    return entries


def differences(entries: Tensor) -> Tensor:
    """Encoding errors, in place of table entries."""
    return entries.bitwise_and_(~_CODE).view(torch.float32)
