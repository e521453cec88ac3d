"""Codes of 8 bits for numbers of 16, from a table: no tensor, however large, has more than 65,536 different ones.

The encoder fills the table, so that what is looked up has its very bits. An entry is the difference that coding makes,
in fp32, whose lowest byte is 0 where scales are powers of two; the code lies in it. One gather then gives both.
"""

import functools

import torch
from torch import Tensor

from lpconv.forms.blocks import Workspace, as_float32, error_of, num_zeros
from lpconv.forms.facts import BlockError

__all__ = ["LEAST_ELEMENTS", "numbers", "pack", "unpack"]

LEAST_ELEMENTS = 2**15  # of a block, for which a table pays
_CODE = 0xFF


@functools.lru_cache(maxsize=2)
def numbers(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype in fp32, by its bit pattern."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).float()


def pack(difference: Tensor, codes: Tensor, used: Tensor) -> Tensor | None:
    """The table of fp32 differences and their codes, all three by bit pattern; None where one that is used needs its
    lowest byte."""
    bits = difference.view(torch.int32)
    return None if (bits[used] & _CODE).any() else bits & ~_CODE | codes.view(torch.uint8)


def unpack(x: Tensor, table: Tensor, codes: Tensor, work: Workspace) -> BlockError:
    """Write the codes of a block, 1-D, into `codes`, and return what coding costs."""
    patterns = work.coded[: x.numel()].view(torch.int32).copy_(x.view(torch.uint16))
    found = torch.index_select(table, 0, patterns, out=work.error[: x.numel()].view(torch.int32))
    codes.view(torch.uint8).copy_(found)  # the lowest byte of each
    error = found.bitwise_and_(~_CODE).view(torch.float32)
    return error_of(error, lambda: as_float32(x, work), num_flushed=num_zeros(codes) - num_zeros(x))
