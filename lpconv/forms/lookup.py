"""Codes of at most 8 bits for numbers of 16, from a table: no tensor, however large, has more than 65,536 of these.

The encoder fills the table, so that what is looked up has its very bits. An entry is the difference that coding makes,
in fp32, whose lowest byte is 0 where scales are powers of two, or have few bits; the code lies in it. One gather then
gives both. Where tiles have a scale each, a number is looked up in the table of its tile's: of all weights these are a
few neighbouring powers of two, or such e4m3fn numbers over one power of two, whose tables lie behind each other.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS
from lpconv.forms.blocks import Workspace

LEAST_ELEMENTS = 2**15  # of a block, for which a table pays
_CODE = 0xFF
_MANTISSA_BITS = FORMATS["fp32"].mantissa_bits
_MANTISSA = (1 << _MANTISSA_BITS) - 1
# For scales of so many bits of a significand below its first tables lie behind each other by so many, and no more.
_BY_BITS = {0: (8, 32), FORMATS["e4m3fn"].mantissa_bits: (32, 64)}
# Tables behind each other; and where they are more, at which entry each tile's begins, which broadcasts as scales do.
Tables = tuple[Tensor, Tensor | None]
# The scales that have tables: the bits of the lowest without its last ones, how many scales, and how many such bits.
Span = tuple[int, int, int]


@functools.lru_cache(maxsize=2)
def numbers(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype in fp32, by its bit pattern."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float()


def table(difference: Tensor, codes: Tensor, used: Tensor) -> Tensor | None:
    """The table of fp32 differences and their codes, all three by bit pattern; None where one that is used needs its
    lowest byte."""
    bits = difference.view(torch.int32)
    return None if (bits[used] & _CODE).any() else bits & ~_CODE | codes.view(torch.uint8)


def span_of_scales(scales: Tensor) -> Span | None:
    """The scales for which some fp32 ones need tables; None where they have too many bits, or lie too far apart."""
    bits = scales.numpy().view(np.int32)
    any_bits = int(np.bitwise_or.reduce(bits, axis=None)) & _MANTISSA if bits.size else _MANTISSA
    for kept, (by, most) in _BY_BITS.items():
        dropped = _MANTISSA_BITS - kept
        if not any_bits & (1 << dropped) - 1:
            low, high = int(bits.min()), int(bits.max())
            first = (low >> dropped) // by * by
            count = ((high >> dropped) // by + 1) * by - first
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
    """At which entry of the tables of a span that of each scale begins."""
    first, _, dropped = span
    return (scales.view(torch.int32) >> dropped).sub_(first).mul_(2**16)


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
