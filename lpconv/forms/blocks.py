"""What all forms do with a block of numbers: the buffers of a thread, statistics, and what rounding cost.

The work is done in blocks of `BLOCK_ELEMENTS`, small enough that the dozen passes of eager PyTorch over one block run
in the cache; a `Workspace` holds buffers, so that nothing is allocated per block.

Errors are of the decoded value against the source's fp32 value, over its finite elements. Where rounding makes a
non-zero element zero its relative error is exactly 1, which is how flushed elements are found without another pass.
"""

import math
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lpconv.forms.facts import BlockError, BlockStats
from lpconv.forms.ranges import BLOCK_ELEMENTS
from lpconv.mcf.blocks import SCRATCH_ELEMENTS

# fp32 squares overflow from 2^64 on and lose everything below 2^-75: sums below this and infinite ones are taken again
# in fp64.
_SQUARES_LOW = 1e-30
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # of as many bytes


class Scratch(threading.local):
    """fp32 buffers that each thread has for itself: what is in them is used up before a block is done."""

    def __init__(self) -> None:
        self.value, self.coded, self.error = (torch.empty(BLOCK_ELEMENTS) for _ in range(3))
        self.split = torch.empty(SCRATCH_ELEMENTS)


class Workspace:
    """Buffers for one block in flight: raw source bytes, room for the data of both files, and fp32 scratch.

    Of several with one `scratch` a thread works in the same memory, which stays in its cache, whichever it takes.
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.raw, self.root, self.residual = (torch.empty(BLOCK_ELEMENTS * 8, dtype=torch.uint8) for _ in range(3))
        self.scratch = scratch or Scratch()


def room(buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first `count` elements of a byte buffer as `dtype`."""
    return buffer[: count * dtype.itemsize].view(dtype)


def as_float32(x: Tensor, work: Workspace) -> Tensor:
    """`x` (1-D, any floating dtype) in fp32: itself, or converted into the workspace. fp64 is rounded to fp32 first."""
    return x if x.dtype == torch.float32 else work.scratch.value[: x.numel()].copy_(x)


def block_stats(x: Tensor, work: Workspace, absmax: float | None = None) -> BlockStats:
    """Statistics of one block of a source tensor (1-D, any floating dtype), whose largest magnitude may be known."""
    if absmax is None and x.itemsize == 2 and x.numel():
        absmax = _absmax(x)  # while what was just read is in the cache
    value = as_float32(x, work)
    sum_squares = float(torch.dot(value, value))
    if _SQUARES_LOW < sum_squares < math.inf:
        if absmax is None:
            absmax = _absmax(value)
        return BlockStats(num_elements=x.numel(), sum_squares=sum_squares, absmax=absmax)
    exact = value.double()
    finite = exact[torch.isfinite(exact)]
    num_nan = int(torch.isnan(value).sum())
    return BlockStats(
        num_elements=x.numel(),
        sum_squares=float(torch.dot(finite, finite)),
        absmax=float(finite.abs().max()) if finite.numel() else 0.0,
        num_nan=num_nan,
        num_inf=x.numel() - finite.numel() - num_nan,
    )


def finite_absmax(x: Tensor, work: Workspace) -> float:
    """The largest magnitude among the finite numbers of a block (1-D, any floating dtype), 0 where there is none."""
    absmax = _absmax(x) if x.itemsize in (2, 4) and x.numel() else math.inf
    return absmax if math.isfinite(absmax) else block_stats(x, work).absmax


def _absmax(x: Tensor) -> float:
    """The largest magnitude of some numbers, fp32 or of 16 bits, by their bit patterns; Inf or NaN where there are.

    As integers with a sign the positive ones are in order, and the largest negative one has the largest pattern
    without: no number is converted, and a maximum takes a fifth of the time.
    """
    signed = x.view(_INTEGERS[x.itemsize]).numpy()
    positive, negative = int(np.maximum.reduce(signed)), int(np.maximum.reduce(signed.view(f"u{x.itemsize}")))
    bits = max(positive, negative & ((1 << 8 * x.itemsize - 1) - 1))
    if x.dtype == torch.float16:
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 32 - 8 * x.itemsize).view(np.float32))


def num_zeros(codes: Tensor) -> int:
    """How many floating-point numbers, or codes of them, are 0 or -0."""
    if codes.dtype == torch.float32:
        return int(np.count_nonzero(codes.numpy() == 0))  # many times faster than torch counts
    signed = codes.view(_INTEGERS[codes.itemsize]).numpy()
    has_one_zero = codes.itemsize == 2 and np.minimum.reduce(signed) > -(2**15)  # which is -0
    either = signed if has_one_zero else signed + signed  # twice -0 is more than the type holds: 0
    return signed.size - int(np.count_nonzero(either))


def block_error(wanted: Tensor, got: Tensor, *, num_flushed: int = 0) -> BlockError:
    """The error of `got` (overwritten) against `wanted`, both fp32; where `wanted` is not finite it counts as 0.

    Where it is known that finite numbers stayed so and that some, `num_flushed`, became 0, it takes half of the time.
    """
    return error_of(got.sub_(wanted), lambda: wanted, num_flushed=num_flushed)


def error_of(got: Tensor, original: Callable[[], Tensor], *, num_flushed: int = 0) -> BlockError:
    """As `block_error`, where `got` (overwritten) is the difference to what `original` gives."""
    sum_squares = float(torch.dot(got, got))
    if num_flushed and _SQUARES_LOW < sum_squares < math.inf:
        return BlockError(sum_squares=sum_squares, max_relative=1.0, num_flushed=num_flushed)
    wanted = original()
    if not _SQUARES_LOW < sum_squares < math.inf:  # too small or large for fp32, or NaN where wanted is not finite
        got.nan_to_num_(0.0, math.inf, -math.inf)
        if _range(got) == (0, 0):
            return BlockError()
        exact = got.double()
        sum_squares = float(torch.dot(exact, exact))
    low, high = _range(got.div_(wanted))
    if math.isnan(low):  # 0 / 0
        low, high = _range(got.nan_to_num_(0.0, math.inf, -math.inf))
    worst = max(-low, high)
    return BlockError(
        sum_squares=sum_squares,
        max_relative=worst,
        num_saturated=int(torch.isinf(got).sum()) if math.isinf(worst) else 0,
        num_flushed=int(np.count_nonzero(got.numpy() == -1)) if worst >= 1 else 0,
    )


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Equal fp32 numbers bit for bit, but for the payload of NaNs."""
    if np.array_equal(a.numpy().view(np.int32), b.numpy().view(np.int32)):  # five times as fast as torch compares them
        return True
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        a.nan_to_num(0.0, math.inf, -math.inf).view(torch.int32),
        b.nan_to_num(0.0, math.inf, -math.inf).view(torch.int32),
    )


def _range(x: Tensor) -> tuple[float, float]:
    """Least and largest element, NaN if any is. Two reductions are vectorised on the CPU, `aminmax` is not."""
    return float(torch.amin(x)), float(torch.amax(x))
