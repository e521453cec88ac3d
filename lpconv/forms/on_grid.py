"""Weights that are already on the grid of a form, e.g. from quantisation-aware training or another quantiser.

Such a weight is code · s in every tile, rounded to the dtype of its file, but s is not stored. Another scale would
round it a second time; with s itself nothing is lost. It is found in three steps, of which a weight that is on no grid
takes only the first:

1. Some numbers of one tile are tested: random ones are on no grid of up to 8 bits. 2. The largest number of a tile is
some code times s. For floating-point codes only the significand is unknown, because a scale that is smaller by a power
of two represents the same numbers; for integers it is the ratio to the smallest number, which is one step or a few. So
a few guesses give the codes, and each number an interval for s: the scales with which its code rounds to it. The
intersection of a tile's intervals contains s. 3. With s every number is decoded and compared. The scales are kept if
all are equal.

Zeros of integers have no sign, so -0 becomes 0. The two levels of NVFP4 scales are not searched, and int8 in a 16-bit
file is found only if rounding to 16 bits, which is about as coarse as its steps, leaves the guesses right.

Letters in shapes: H rows and W columns of a block, R and C tiles along rows and columns.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lpconv.formats.codes import nearest_code_
from lpconv.formats.scale import pow2_ceil
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.blocks import Workspace
from lpconv.forms.form import Over

# A function of numbers and scales, both [H, W], to facts [facts, H, W] in fp64, reduced by maximum over each tile.
Facts = Callable[[Tensor, Tensor], Tensor]

_BITS = {torch.float16: 11, torch.bfloat16: 8}  # significand bits; wider dtypes are read as fp32, which has 24
_HALF_STEP = {torch.float16: 2.0**-25}  # half a step of subnormal numbers
_SLACK = 2.0**-50  # of interval ends in fp64; a scale may be at one, where ties round to even
_SAMPLE = 128
_FIRST = 4  # numbers that suffice to rule out a grid for random weights
_INTEGERS = np.arange(1.0, 129.0).reshape(-1, 1)
_FEW = 16  # numbers that have one scale in every layout
_COMMON = ("int4", "e2m1", "e4m3fn", "int8")  # the coarsest first
# For integers: possible codes of the smallest number, and changes of the largest code by rounding to 16 bits.
_STEPS = (*((step, 0) for step in range(1, 17)), *((step, more) for step in (1, 2, 3) for more in (1, -1)))


def _least(x: Tensor, _: Tensor) -> Tensor:
    """Negated magnitudes, so that a maximum finds the smallest; zeros are ignored."""
    value = x.double().abs()
    return torch.where(value == 0, -math.inf, -value).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class OnGrid:
    """Finds the scales of a weight whose codes are `format`, one for each `tile` of (rows, columns) (0: all).

    `cols` is the length of rows, None for one scale for all numbers. With `has_short_scales`, only scales that bf16 can
    represent are considered.
    """

    format: Format
    has_pow2_scale: bool
    tile: tuple[int, int] = (0, 0)
    cols: int | None = None
    has_short_scales: bool = False

    def looks_so(self, x: Tensor) -> bool:
        """Whether some numbers of a block may be on a grid: those of the first row's tile with the largest number."""
        row = x[: self.cols or _SAMPLE]
        width = min(self.tile[1] or len(row), len(row))
        tiles = row[: len(row) // width * width].view(-1, width)
        largest = int(tiles.float().abs().amax(1).argmax()) if len(tiles) > 1 else 0
        return self.fits(tiles[largest][:_SAMPLE])

    def fits(self, sample: Tensor) -> bool:
        """Whether some numbers (1-D) may have a common scale."""
        if sample.dtype != torch.float16 and not self._may_fit(sample):  # small fp16 numbers have fewer bits
            return False
        largest, least = sample.double().abs().amax().view(1, 1), -_least(sample, sample).amax().view(1, 1)
        if not 0 < float(largest) < math.inf:
            return False
        guesses = torch.cat(list(self._guesses(largest, least)))
        shape = len(guesses), len(sample)
        low, high = self._ends(sample.expand(shape), guesses.float().expand(shape)).amax(-1)
        return bool(((guesses[:, 0] > 0) & (low <= -high)).any())

    def _may_fit(self, sample: Tensor) -> bool:
        """A fast test that every sample on the grid passes, in a tenth of the time of `fits`.

        The ratio of each number to the largest must be a ratio of two codes, up to the rounding of both.
        """
        value = sample.double().abs().numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            unit = value / value.max() * _codes_of_largest(self.format)
        if not self.format.twos_complement:
            unit = np.frexp(unit)[0] * 2.0 ** (self.format.mantissa_bits + 1)
        return _some_row_is_whole(unit, sample.dtype)

    def scales(self, over: Over, absmax: Tensor, usual: Tensor) -> Tensor | None:
        """Scales with which the codes reproduce every number of the weight, [R, C] as `usual`; None if there are none.

        `absmax` are the largest magnitudes of tiles, `usual` their usual scales, which are kept if they do.
        """
        if self.tile[0] == 1 and self.cols:  # blocks share no tile
            cols = self.cols

            def in_rows(x: Tensor, start: int, work: Workspace) -> Tensor | None:
                rows = slice(start // cols, (start + len(x)) // cols)
                return self._scales_in_rows(x, absmax[rows], usual[rows].float(), work)

            per_block = list(over(in_rows))
            exact = [scales.to(usual.dtype) for scales in per_block if scales is not None]
            return torch.cat(exact) if len(exact) == len(per_block) else None
        scales, left = usual, self._tiles(over, self._mismatch, usual)[0] > 0
        least = -self._tiles(over, _least, usual)[0] if self.format.twos_complement else absmax
        for guess in self._guesses(absmax.double(), least.double()):
            if left.any():
                scales, left = self._try_guess(over, guess, scales, left)
        return None if left.any() else scales

    def _scales_in_rows(self, x: Tensor, absmax: Tensor, usual: Tensor, work: Workspace) -> Tensor | None:
        """`scales` for whole rows (1-D) whose tiles are parts of one row, [H, C]; only tests the remaining tiles."""
        rows, width = x.view(-1, self.cols or len(x)), self.tile[1] or self.cols or len(x)
        tiles = pad(rows, (0, -rows.shape[1] % width)).view(-1, width)  # zeros change nothing
        one = replace(self, tile=(1, 0), cols=width)

        def over(which: Tensor) -> Over:
            return lambda job: [job(tiles[which].view(-1), 0, work)]

        scales, largest, every = usual.reshape(-1, 1).clone(), absmax.reshape(-1, 1).double(), torch.arange(len(tiles))
        left = every[one._tiles(over(every), one._mismatch, scales)[0, :, 0] > 0]
        least = -one._tiles(over(every), _least, scales)[0] if self.format.twos_complement else largest
        for guess in self._guesses(largest, least):
            if not len(left):
                break
            scales[left], wrong = one._try_guess(over(left), guess[left], scales[left], torch.ones(len(left), 1).bool())
            left = left[wrong[:, 0]]
        return None if len(left) else scales.view(usual.shape)

    def _try_guess(self, over: Over, guess: Tensor, scales: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """Try a guess for the tiles that are `left`; return the improved scales and the tiles that are still left."""
        trial = torch.where(left & (guess > 0), guess.float(), scales)
        for scale in self._scales_in_interval(*self._tiles(over, self._ends, trial)):
            is_better = left & (scale > 0)
            if is_better.any():
                scales = torch.where(is_better, scale.float(), scales)
                left = self._tiles(over, self._mismatch, scales)[0] > 0
        return scales, left

    def _tiles(self, over: Over, facts: Facts, scales: Tensor) -> Tensor:
        """Per-tile maxima of each fact for the given scales, shape [facts, R, C]."""

        def look(x: Tensor, start: int, work: Workspace) -> Tensor:
            rows = x.view(-1, self.cols or len(x))
            width = self.tile[1] or rows.shape[1]
            first = start // self.cols if self.cols else 0
            index = torch.arange(first, first + len(rows)) // (self.tile[0] or first + len(rows))
            values = facts(rows, scales[index].repeat_interleave(width, 1)[:, : rows.shape[1]])
            padded = pad(values, (0, -rows.shape[1] % width), value=-math.inf)
            return padded.view(*padded.shape[:2], -1, width).amax(-1)

        parts = torch.cat(list(over(look)), 1)
        height = self.tile[0] or parts.shape[1]
        return parts if height == 1 else torch.stack([p.amax(1) for p in torch.split(parts, height, 1)], 1)

    def _codes(self, x: Tensor, scales: Tensor) -> Tensor:
        return nearest_code_((x.float() / scales).contiguous(), self.format)

    def _mismatch(self, x: Tensor, scales: Tensor) -> Tensor:
        """1 where a code does not decode to its number, in the dtype of the file."""
        value = x.float() if x.dtype == torch.float64 else x
        return (self._codes(x, scales).mul_(scales).to(value.dtype) != value).double().unsqueeze(0)

    def _ends(self, x: Tensor, scales: Tensor) -> Tensor:
        """Intervals of scales with which the current codes decode to their numbers: [smallest, -largest].

        If code and number are both zero any scale is allowed, if only one of them is, none.
        """
        value, code = x.double().abs(), self._codes(x, scales).double().abs()
        significand, exponent = torch.frexp(value)
        above = torch.ldexp(torch.ones_like(value), exponent - _BITS.get(x.dtype, 24) - 1)
        below = torch.where(significand == 0.5, above / 2, above)  # powers of two have a nearer neighbour below
        above, below = (half.clamp_min(_HALF_STEP.get(x.dtype, 0.0)) for half in (above, below))
        ends = torch.stack([(value - below) / code * (1 - _SLACK), -(value + above) / code * (1 + _SLACK)])
        return torch.where(code == 0, torch.where(value == 0, -math.inf, math.inf), ends)

    def _guesses(self, largest: Tensor, least: Tensor) -> Iterator[Tensor]:
        """Yield possible scales of tiles from their largest and smallest magnitude; 0 for an impossible guess."""
        top = self.format.max
        if self.has_pow2_scale:
            tops = [top, top + 1] if self.format.twos_complement else [top]
            yield from (pow2_ceil(largest / t) for t in tops)
        elif self.format.twos_complement:
            step, more = (torch.tensor(which).view(-1, 1, 1) for which in zip(*_STEPS, strict=True))
            code = (largest / least * step).round() + more
            yield from torch.where((code >= 1) & (code <= top + 1), largest / code, 0.0)
        else:
            last = math.ldexp(1.0, self.format.max_exponent)
            significands = (last * (1 + i * self.format.eps) for i in reversed(range(2**self.format.mantissa_bits)))
            yield from (largest / code for code in (*significands, last / 2 * (2 - self.format.eps)) if code <= top)

    def _scales_in_interval(self, low: Tensor, negative_high: Tensor) -> Iterator[Tensor]:
        """Yield scales in the interval of each tile, short ones first; 0 if there is none."""
        middle = (low - negative_high) / 2
        tried = [pow2_ceil(low)] if self.has_pow2_scale else [middle.bfloat16().double()]
        if not (self.has_pow2_scale or self.has_short_scales):
            tried.append(middle.float().double())
        for scale in tried:
            yield torch.where((low <= scale) & (scale <= -negative_high) & (scale < math.inf), scale, 0.0)


@functools.cache
def _codes_of_largest(fmt: Format) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Possible codes of the largest number, for floats up to a power of two, [codes, 1]."""
    steps = 2**fmt.mantissa_bits
    codes = np.arange(1, fmt.max + 2) if fmt.twos_complement else 1 + np.arange(steps) / steps
    return codes.reshape(-1, 1)


def _some_row_is_whole(unit: "np.ndarray[tuple[int, int], np.dtype[np.float64]]", dtype: torch.dtype) -> bool:
    """Whether all numbers of some row are integers, up to the rounding of two numbers of `dtype`."""
    slack = 2.0 ** (3 - _BITS.get(dtype, 24))
    return bool((np.abs(unit - np.rint(unit)) <= slack * unit).all(1).any())


def first_look(x: Tensor, rule: OnGrid | None) -> tuple[bool, str | None]:
    """Whether the first block of a weight may be on the grid of `rule`, and the format on whose grid it seems to be."""
    cols = rule.cols if rule else None
    if not _may_be_codes(x[: min(_FEW, cols or _FEW)]):
        return False, None
    return rule is not None and rule.format.storage_bits <= 8 and rule.looks_so(x), _grid_of(x, cols)


def _may_be_codes(sample: Tensor) -> bool:
    """A fast test that the numbers of every grid of up to 8 bits pass.

    The ratios of the first numbers must be ratios of integers up to 128, times powers of two. 16-bit numbers are too
    coarse to tell.
    """
    value = sample.double().abs().numpy()
    value = value[(value > 0) & (value < math.inf)][:_FIRST]
    if sample.dtype in _BITS or len(value) < _FIRST:
        return True
    return _some_row_is_whole(np.frexp(value[1:] / value[0] * _INTEGERS)[0] * len(_INTEGERS) * 2, sample.dtype)


def _grid_of(x: Tensor, cols: int | None) -> str | None:
    """The format on whose grid a block (1-D) seems to be, for any scales; None if there is none.

    It is tested in many places, since some trained 16-bit weights begin with a few multiples of one number, and pruned
    ones have few numbers.
    """
    step = cols if cols and cols % _FEW else _FEW  # so that a sample does not span rows
    runs = x[: len(x) // step * step].view(-1, step)[:, :_FEW]
    samples = [run for run in runs[:: max(1, len(runs) // 16)] if len(run) == _FEW and run.count_nonzero()]
    names = [n for n in _COMMON if n != "int8" or x.dtype == torch.float32]  # 16 bits are about as coarse
    return next((n for n in names if samples and all(_is_of(n, run) for run in samples)), None)


def _is_of(name: str, sample: Tensor) -> bool:
    """Whether some numbers may be codes of a format times one scale."""
    fmt = FORMATS[name]
    is_few = len(set(sample.abs().tolist())) <= 2 ** (fmt.storage_bits - 1) + 1
    return is_few and OnGrid(format=fmt, has_pow2_scale=False).fits(sample)
