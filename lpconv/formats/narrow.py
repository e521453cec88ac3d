"""In-place rounding to formats of few bits on a CPU, with codes packed as in files.

Equivalent to `formats.cast` and `formats.codes` but several times faster. Integers are stored unsigned here, biased by
half of their range, as other tools pack them into words.

Rounding adds and subtracts 1.5 · 2^23 steps: next to that, float32 has no bits for less than a step. The lowest byte of
the sum is the number of steps and is read from the bits, since torch casts float32 to bytes one by one.
"""

import numpy as np
import torch
from torch import Tensor

from lpconv.formats.spec import FORMATS, Format

_BITS = FORMATS["fp32"].mantissa_bits


def nearest_(x: Tensor, element: Format) -> Tensor:
    """Round finite float32 to a format of at most 8 bits like `formats.cast`, in place; zeros may lose their sign."""
    shift = _shift(x.clamp_(-element.max, element.max), element, torch.empty_like(x))
    return x.add_(shift).sub_(shift)


def nearest_code_(x: Tensor, element: Format) -> Tensor:
    """Round like `nearest_`, in place, but let integers use all their codes, including -8 or -128."""
    if not element.twos_complement:
        return nearest_(x, element)
    return x.round_().clamp_(-element.max - 1, element.max)


def encode_narrow_(x: Tensor, element: Format, codes: Tensor, spare: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Round finite float32 (1-D) to e2m1, int4 or int8 in place, write one code per byte into `codes`, and return `x`.

    Codes are those of `formats.codes`, but integers are stored as n + 8 or n + 128, and numbers nearest to -8 or -128
    keep that value. Zeros lose their sign in `x`, not in the codes. `spare` are optional buffers of that size, one
    float32 and one uint8.
    """
    x.clamp_(-element.max - element.twos_complement, element.max)
    if element.twos_complement:
        bias = 1.5 * 2.0**_BITS + _half(element)
        codes.copy_(x.add_(bias).view(torch.int32))
        return x.sub_(bias)
    wide, narrow = spare or (torch.empty_like(x), torch.empty_like(codes))
    np.signbit(x.numpy(), out=narrow.view(torch.bool).numpy())  # torch takes eight times as long
    shift, dropped = _shift(x, element, wide), _BITS - element.mantissa_bits
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


def pack_nibbles(codes: Tensor, spare: Tensor | None = None) -> Tensor:
    """Pack 4-bit codes (1-D bytes) two to a byte, the first in the lower half.

    `spare` is a buffer of twice as many bytes.
    """
    pairs = codes.view(torch.int16)
    count = codes.numel()
    spare = torch.empty(2 * count, dtype=torch.uint8) if spare is None else spare
    both = torch.bitwise_right_shift(pairs, 4, out=spare[:count].view(torch.int16)).bitwise_or_(pairs)
    return spare[count : count + count // 2].copy_(both)


def _shift(x: Tensor, element: Format, out: Tensor) -> Tensor:
    """1.5 · 2^23 steps of each number's binade; adding and subtracting them rounds a number within the range."""
    power = torch.bitwise_and(x.view(torch.int32), 0x7F800000, out=out.view(torch.int32)).view(torch.float32)
    return power.clamp_min_(element.min_normal).mul_(1.5 * 2.0 ** (_BITS - element.mantissa_bits))


def _half(element: Format) -> int:
    """The sign bit, which is also the bias that makes integer codes non-negative."""
    return 1 << (element.bits - 1)
