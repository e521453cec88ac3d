"""Block operations of all forms: per-thread buffers, statistics, and rounding errors.

Tensors are processed in blocks of `BLOCK_ELEMENTS`, small enough that the dozen passes of eager PyTorch over one block
run in the cache; a `Workspace` holds buffers, so that nothing is allocated per block.

Errors are differences between the decoded value and the source's fp32 value, over its finite elements. If rounding
makes a non-zero element zero its relative error is exactly 1, so flushed elements are found without another pass.
"""

import math
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lpconv.forms.facts import BLOCK_ELEMENTS, BlockError, BlockStats
from lpconv.mcf.split import SCRATCH_ELEMENTS

# fp32 squares overflow from 2^64 on and vanish below 2^-75: sums below this limit, and infinite ones, are computed
# again in fp64.
_SQUARES_LOW = 1e-30
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # integers of the same size in bytes


class Scratch(threading.local):
    """fp32 buffers of one thread; their contents are valid within a block only."""

    def __init__(self) -> None:
        self.value, self.coded, self.error = (torch.empty(BLOCK_ELEMENTS) for _ in range(3))
        self.split = torch.empty(SCRATCH_ELEMENTS)


class Workspace:
    """Buffers for one block: raw source bytes, the output data of both files, and fp32 scratch.

    Several workspaces with the same `scratch` share it, so that a thread always works in memory that is in its cache.
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        self.raw, self.root, self.residual = (torch.empty(BLOCK_ELEMENTS * 8, dtype=torch.uint8) for _ in range(3))
        self.scratch = scratch or Scratch()


def buffer_view(buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first `count` elements of a byte buffer as `dtype`."""
    return buffer[: count * dtype.itemsize].view(dtype)


def as_float32(x: Tensor, work: Workspace) -> Tensor:
    """`x` (1-D, any floating dtype) in fp32: itself, or converted into the workspace. fp64 is rounded to fp32."""
    return x if x.dtype == torch.float32 else work.scratch.value[: x.numel()].copy_(x)


def block_stats(x: Tensor, work: Workspace, absmax: float | None = None) -> BlockStats:
    """Statistics of a block of a source tensor (1-D, any floating dtype), given its largest magnitude if known."""
    if absmax is None and x.itemsize == 2 and x.numel():
        absmax = _absmax(x)  # now, while x is in the cache
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
    """The largest finite magnitude of a block (1-D, any floating dtype), 0 if there is none."""
    absmax = _absmax(x) if x.itemsize in (2, 4) and x.numel() else math.inf
    return absmax if math.isfinite(absmax) else block_stats(x, work).absmax


def _absmax(x: Tensor) -> float:
    """The largest magnitude of fp32 or 16-bit numbers, from their bit patterns; Inf or NaN if there are any.

    As signed integers, the patterns of positive numbers are in order; as unsigned integers, the negative number of
    largest magnitude has the largest pattern. So no number is converted, which takes a fifth of the time.
    """
    signed = x.view(_INTEGERS[x.itemsize]).numpy()
    positive, negative = int(np.maximum.reduce(signed)), int(np.maximum.reduce(signed.view(f"u{x.itemsize}")))
    bits = max(positive, negative & ((1 << 8 * x.itemsize - 1) - 1))
    if x.dtype == torch.float16:
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 32 - 8 * x.itemsize).view(np.float32))


def num_zeros(codes: Tensor) -> int:
    """Number of floating-point numbers, or of their codes, that are 0 or -0."""
    if codes.dtype == torch.float32:
        return int(np.count_nonzero(codes.numpy() == 0))  # many times faster than torch
    signed = codes.view(_INTEGERS[codes.itemsize]).numpy()
    has_one_zero = codes.itemsize == 2 and np.minimum.reduce(signed) > -(2**15)  # the pattern of -0
    either = signed if has_one_zero else signed + signed  # doubling -0 overflows to 0
    return signed.size - int(np.count_nonzero(either))


def block_error(wanted: Tensor, got: Tensor, *, num_flushed: int = 0) -> BlockError:
    """The error of `got` (overwritten) against `wanted`, both fp32; 0 for elements that are not finite in `wanted`.

    Takes half of the time if `num_flushed` finite numbers are known to have become 0, and none infinite.
    """
    return error_of(got.sub_(wanted), lambda: wanted, num_flushed=num_flushed)


def error_of(got: Tensor, original: Callable[[], Tensor], *, num_flushed: int = 0) -> BlockError:
    """`block_error`, where `got` (overwritten) is already the difference to the tensor from `original`."""
    sum_squares = float(torch.dot(got, got))
    if num_flushed and _SQUARES_LOW < sum_squares < math.inf:
        return BlockError(sum_squares=sum_squares, max_relative=1.0, num_flushed=num_flushed)
    wanted = original()
    if not _SQUARES_LOW < sum_squares < math.inf:  # too small or large for fp32, or NaN if wanted is not finite
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
    """Whether fp32 tensors are bitwise equal, except for the payload of NaNs."""
    if np.array_equal(a.numpy().view(np.int32), b.numpy().view(np.int32)):  # five times as fast as in torch
        return True
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        a.nan_to_num(0.0, math.inf, -math.inf).view(torch.int32),
        b.nan_to_num(0.0, math.inf, -math.inf).view(torch.int32),
    )


def _range(x: Tensor) -> tuple[float, float]:
    """Smallest and largest element, NaN if there is one; on the CPU faster than `aminmax`, which is not vectorised."""
    return float(torch.amin(x)), float(torch.amax(x))
