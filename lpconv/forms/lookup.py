"""Codes of at most 8 bits for numbers of 16, from a table: no tensor, however large, has more than 65,536 of these.

The encoder fills the table, so that what is looked up has its very bits. An entry is the difference that coding makes,
in fp32, whose lowest byte is 0 where scales are powers of two; the code lies in it. One gather then gives both. Where
tiles have a scale each, a number is looked up in the table of its tile's: of all weights these are a few neighbouring
powers of two, whose tables lie behind each other.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS
from lpconv.forms.blocks import Workspace

__all__ = [
    "LEAST_ELEMENTS",
    "Tables",
    "beginnings",
    "binades",
    "differences",
    "look_up",
    "numbers",
    "patterns",
    "table",
]

LEAST_ELEMENTS = 2**15  # of a block, for which a table pays
_CODE = 0xFF
_MANTISSA_BITS = FORMATS["fp32"].mantissa_bits
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_BINADES, _MOST_BINADES = 8, 32  # tables lie behind each other by so many, and no more
# Tables behind each other; and where they are more, at which entry each tile's begins, which broadcasts as scales do.
Tables = tuple[Tensor, Tensor | None]


@functools.lru_cache(maxsize=2)
def numbers(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype in fp32, by its bit pattern."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float()


def table(difference: Tensor, codes: Tensor, used: Tensor) -> Tensor | None:
    """The table of fp32 differences and their codes, all three by bit pattern; None where one that is used needs its
    lowest byte."""
    bits = difference.view(torch.int32)
    return None if (bits[used] & _CODE).any() else bits & ~_CODE | codes.view(torch.uint8)


def binades(scales: Tensor) -> tuple[int, int] | None:
    """The powers of two for which fp32 scales need tables, by the lowest biased exponent and their number; None where
    they are not all powers of two, or lie too far apart."""
    bits = scales.numpy().view(np.int32)
    if not bits.size or int(np.bitwise_or.reduce(bits, axis=None)) & _MANTISSA:
        return None
    low, high = int(bits.min()) >> _MANTISSA_BITS, int(bits.max()) >> _MANTISSA_BITS
    first = low // _BINADES * _BINADES
    count = (high // _BINADES + 1) * _BINADES - first
    return (first, count) if low > 0 and high < 0xFF and count <= _MOST_BINADES else None


def beginnings(scales: Tensor, first: int) -> Tensor:
    """At which entry of tables from the exponent `first` on that of each scale begins."""
    return (scales.view(torch.int32) >> _MANTISSA_BITS).sub_(first).mul_(2**16)


def patterns(x: Tensor, begin: Tensor | None, work: Workspace) -> Tensor:
    """At which entries of tables 16-bit numbers, 1-D, are looked up; `begin` is where each tile's begin.

    They take the place of the numbers in fp32: what is in use of a workspace then nearly fits a core's own cache.
    """
    found = work.scratch.value[: x.numel()].view(torch.int32).copy_(x.view(torch.uint16))
    if begin is not None:
        found.view(*begin.shape[:-1], -1).add_(begin)
    return found


def look_up(x: Tensor, tables: Tables, codes: Tensor, work: Workspace) -> Tensor:
    """Write the codes of a block, 1-D, into `codes`, and return the entries, for `differences`."""
    found, begin = tables
    out = work.scratch.error[: x.numel()].view(torch.int32)
    entries = torch.index_select(found, 0, patterns(x, begin, work), out=out)
    codes.view(torch.uint8).copy_(entries)  # the lowest byte of each
    return entries


def differences(entries: Tensor) -> Tensor:
    """The differences that coding makes, in the place of entries of a table."""
    return entries.bitwise_and_(~_CODE).view(torch.float32)
