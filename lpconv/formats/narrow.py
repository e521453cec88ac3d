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
        sign = (x.view(torch.int32) >> 28) & 8
        bits = nearest_(x.abs_(), element).view(torch.int32)
        # Exponent and mantissa stand beside each other in both formats; 0.5 alone is subnormal in the narrow one.
        code = (bits >> 22).sub_(252).clamp_min_(0).add_(x == 0.5).bitwise_or_(sign).to(torch.uint8)
    else:
        code = nearest_(x, element).add_(2.0 ** (element.storage_bits - 1)).to(torch.uint8)
    return code[0::2] | code[1::2] << 4 if element.storage_bits == 4 else code
