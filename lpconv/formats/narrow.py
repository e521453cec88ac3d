"""Rounding to formats of few bits on a CPU, in place, and their codes packed as files have them.

Twins of `formats.cast` and `formats.codes`, several times faster; integers are stored as unsigned ones here, biased by
half of their range, which is how others lay them into words.
"""

import torch
from torch import Tensor

from lpconv.formats.spec import Format

__all__ = ["nearest_", "packed"]


def nearest_(x: Tensor, element: Format) -> Tensor:
    """`formats.cast` of finite float32 to at most 8 bits, in place; zeros may lose their sign.

    The adder rounds: beside 1.5 · 2^23 steps no float32 has room for less than a step.
    """
    x.clamp_(-element.max, element.max)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = power.clamp_min_(element.min_normal).mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))
    return x.add_(shift).sub_(shift)


def packed(x: Tensor, element: Format) -> Tensor:
    """The codes of finite float32 (1-D, overwritten) in e2m1, int4 or int8, as bytes.

    Codes of 4 bits are two in a byte, the first in its lower half. An integer n is stored as n + 8 or n + 128.
    """
    if element.name == "e2m1":
        sign = x.view(torch.uint8)[3::4].bitwise_and(0x80)
        # The halves that the numbers are, 0 1 2 3 4 6 8 12, as 0 to 7.
        code = nearest_(x.abs_(), element).mul_(2).to(torch.uint8)
        code = code - (code.clamp_min(4) - 4 >> 1) - (code.clamp_min(8) - 8 >> 2) | sign >> 4
    else:
        code = nearest_(x, element).add_(2.0 ** (element.storage_bits - 1)).to(torch.uint8)
    if element.storage_bits != 4:
        return code
    pairs = code.view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
