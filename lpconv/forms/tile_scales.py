"""The scales of tiles: the usual ones from one pass over the weights, and the best of several.

*Usual scales* come from the largest magnitude of a tile or its root mean square. Each row's part of each tile is
examined separately; tiles of several rows are combined from these when all rows are known. So blocks may end within
tiles, and only whole rows need be in memory.

*Searched scales* have the least squared error of a few storable scales near the usual one: neighbouring powers of two,
neighbouring e4m3fn numbers, or multiples that bf16 can represent, so that readers that keep scales in bf16 change none.
The usual scale wins ties, so no tile gets worse. Every tile is decided by its own numbers, independently of blocks.

This file knows no form; `tiles.py` passes in what stored scales multiply codes by.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpconv.formats.codes import nearest_code_
from lpconv.formats.grains import Grain
from lpconv.formats.scale import normal_pow2_ceil, normal_pow2_floor, pow2_floor
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.blocks import Workspace, as_float32
from lpconv.forms.form import Over

# Statistics of each row's part of each tile, by name: [rows, tiles along columns].
Parts = Mapping[str, Tensor]
Array = np.ndarray[Any, Any]
# Error in units of the last bit of a root of up to 2^18 fp32 squares, and the range in which no square is lost.
_NEAR = 1 << 14
_LOW, _HIGH = (127 - 40) << 23, (127 + 40) << 23
_SIGN = -(2**31)
_ENDS = ("positive", "negative")
_E2M1_END = 7.0  # half a step above its largest number
_OF_SCALES = FORMATS["e4m3fn"]
_WIDE = 128  # from this many columns on, torch compares floats as fast as integers
_EXPONENTS = (-1, 1)  # steps between stored powers of two
_NEIGHBOURS = tuple(range(-6, 8))  # steps between stored e4m3fn numbers, of which 8 make a binade
# Multiples of the usual scale. Integers gain by clipping their largest number, floats only by the place in a binade.
# The range of each width holds 98 % of the best scales of SmolLM2's groups of 32 and 128.
_CLIPPING = {
    bits: tuple(i / 256 for i in numbers)
    for bits, numbers in {
        2: range(96, 288, 12), 3: range(144, 304, 8), 4: range(176, 304, 8), 5: range(224, 296, 4),
        6: range(224, 296, 4), 7: range(224, 296, 4), 8: range(226, 258, 2),
    }.items()
}  # fmt: skip
_WITHIN_BINADE = tuple(1 + i / 16 for i in range(16))
_SCALES = (2.0**-126, 2.0**127)
_amax, _amin = functools.partial(torch.amax, dim=-1), functools.partial(torch.amin, dim=-1)


@dataclass(frozen=True, kw_only=True)
class TileScales:
    """The rule for the scales of a matrix of (rows, columns), or of some of its rows, with codes in `format`.

    `has_factor` allows the scale that divides all others, if the grain has one, to differ from 1.
    """

    grain: Grain
    format: Format
    matrix: tuple[int, int]
    has_pow2_scale: bool
    has_factor: bool = True

    @property
    def _keeps_all(self) -> bool:
        """Whether codes must restore the source's bits."""
        return self.format.name == "fp32" and self.has_pow2_scale

    def parts(self, value: Tensor, spare: Tensor) -> tuple[Parts, float]:
        """Statistics of each tile's part of some rows, fp32 [rows, cols], and the largest magnitude of all.

        These are the largest magnitude, and whatever else the rule needs. NaN and Inf are ignored, except for the
        returned magnitude. `spare` is an fp32 buffer of the rows' size.
        """
        parts = self._magnitudes(value, spare)
        largest = float(parts["absmax"].max()) if parts["absmax"].numel() else 0.0
        missing = None
        if not math.isfinite(largest):
            finite = torch.isfinite(value)
            value = value.masked_fill(~finite, 0.0)
            parts = self._magnitudes(value, spare)
            missing = self.reduce_columns((~finite).float(), lambda t: t.sum(-1))
        if not self.grain.fits(self.format):
            parts["norm"] = self._norms(value, spare)
            parts["missing"] = torch.zeros(parts["absmax"].shape) if missing is None else missing
        if self._keeps_all:
            parts["last_bit"] = self.reduce_columns(_last_bits(value), _amin)
        return parts, largest

    def join(self, parts: Sequence[Parts]) -> Parts:
        """Combine the parts of all rows to tiles: [tiles along rows, tiles along columns]."""
        height, _ = self.grain.sizes(*self.matrix)
        rows = {k: torch.cat([p[k] for p in parts]) for k in _JOIN if k in parts[0]}
        if height == 1:
            return rows
        return {k: torch.stack([_JOIN[k](p) for p in torch.split(x, height)]) for k, x in rows.items()}

    def factor(self, largest: float) -> Tensor | None:
        """The scale that divides all others, fp32 [1], if the grain has one.

        It maps the largest scale to the largest number of its format, or below for a power of two. `largest` is the
        largest magnitude of all weights that share it.
        """
        if not self.grain.has_factor:
            return None
        return dividing_factor(self.format, largest if self.has_factor else 0.0, pow2=self.has_pow2_scale)

    def stored_scales(self, parts: Parts, factor: Tensor | None) -> Tensor:
        """The scales as stored; with a factor, which divides, in e4m3fn as in NVIDIA's recipe and torchao."""
        if factor is not None:
            scales = (parts["absmax"].double() / self.format.max * factor.double()).float()
            return scales.clamp(_OF_SCALES.min_subnormal, _OF_SCALES.max).to(torch.float8_e4m3fn)
        scales = self._scales(parts)
        return (scales.view(torch.int32) >> 23).to(torch.uint8) if self.grain.scale_dtype == "U8" else scales

    def _magnitudes(self, value: Tensor, spare: Tensor) -> dict[str, Tensor]:
        """The largest magnitudes; for integers also of positive and negative numbers separately."""
        if not self.format.twos_complement:
            return {"absmax": self._absmax(value, spare)}
        ends = self._ends(value, spare)
        return {"absmax": torch.maximum(*ends), **dict(zip(_ENDS, ends, strict=True))}

    def _absmax(self, value: Tensor, spare: Tensor) -> Tensor:
        """The largest magnitudes, for narrow tiles from bit patterns.

        torch compares integers many times faster, and without signs the bits have the order of the magnitudes.
        """
        if self.width >= _WIDE:
            return torch.maximum(self.reduce_columns(value, _amax), -self.reduce_columns(value, _amin))
        bits = spare.view(torch.int32)[: value.numel()].view(value.shape)
        torch.bitwise_and(value.view(torch.int32), 0x7FFFFFFF, out=bits)
        return self.reduce_columns(bits, _amax).view(torch.float32)

    def _ends(self, value: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
        """The largest number of each part and the negated smallest, 0 if there is none, from bit patterns."""
        bits = value.view(torch.int32)
        flipped = spare.view(torch.int32)[: value.numel()].view(value.shape)
        torch.bitwise_xor(bits, _SIGN, out=flipped)
        positive, negative = (self.reduce_columns(x, _amax).clamp_min_(0).view(torch.float32) for x in (bits, flipped))
        return positive, negative

    def _norms(self, value: Tensor, spare: Tensor) -> Tensor:
        """Root of the sum of squares in fp64.

        For tiles that are whole rows, fp32 gives the power of two below in a third of the time; rows whose result is
        uncertain, near a power of two or beyond the range of fp32 squares, are computed again.
        """
        if not self._is_pow2 or self.grain.tile != (1, 0):
            return self.reduce_columns(value, functools.partial(_norm, spare=spare))
        norms_fp32: Tensor = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        rms = (norms_fp32 / math.sqrt(self.width)).numpy().view(np.int32)
        unsure = ((rms + _NEAR & 0x7FFFFF) < 2 * _NEAR) | (rms < _LOW) | (rms > _HIGH)
        norms = norms_fp32.double()
        if unsure.any():
            rows = torch.from_numpy(unsure[:, 0])
            norms[rows, 0] = _norm(value[rows], spare)
        return norms

    @property
    def _is_pow2(self) -> bool:
        return self.has_pow2_scale or self.grain.scale_dtype == "U8"

    @functools.cached_property
    def width(self) -> int:
        """Columns of a tile."""
        return self.grain.sizes(*self.matrix)[1]

    def reduce_columns(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce rows [h, cols] over each tile's part, of which the last may be smaller: [h, tiles]."""
        (height, cols), width = x.shape, self.width
        whole = cols // width * width
        if whole == cols:
            return reduce(x.view(height, -1, width))
        cut = [reduce(x[:, :whole].view(height, -1, width))] if whole else []
        return torch.cat([*cut, reduce(x[:, whole:].unsqueeze(1))], 1)

    def _scales(self, parts: Parts) -> Tensor:
        """The scale of each tile in fp32; 1 for a tile of zeros.

        In formats with few exponents a tile's largest magnitude becomes the format's largest number, or less if the
        scale is a power of two, rounded up so that nothing is clipped (RCEIL); other formats follow `scale_for`. In
        formats of up to 4 bits the largest magnitude may exceed the largest number by less than half a step and still
        round to it, which makes the steps finer for all others. The most negative integer has one step more.
        """
        is_pow2, top = self._is_pow2, self.format.max
        # fp32 division keeps numbers on their side of a power of two; exact scales are rounded once, so use fp64.
        dtype = np.float32 if is_pow2 else np.float64
        magnitudes: dict[str, Array] = {
            k: parts[k].numpy().astype(dtype, copy=False) for k in ("absmax", *_ENDS) if k in parts
        }
        if self.format.twos_complement:
            top += 0.5 if self.format.storage_bits <= 4 else 0.0
            floor = np.maximum(magnitudes["positive"] / top, magnitudes["negative"] / (top + 1))
        elif self.format.storage_bits == 4:
            floor = np.nextafter(magnitudes["absmax"] / _E2M1_END, math.inf)  # half a step is too much
        else:
            floor = magnitudes["absmax"] / top
        floor = np.maximum(floor, 2.0**-126)
        scales = normal_pow2_ceil(floor) if is_pow2 else floor
        if not self.grain.fits(self.format):
            counts = _counts(self.matrix, self.grain.sizes(*self.matrix)) - parts["missing"].numpy()
            rms = parts["norm"].numpy() / np.sqrt(np.maximum(counts, np.float32(1)))
            scales = np.maximum(normal_pow2_floor(rms) if is_pow2 else rms, scales)
        scales = np.where(magnitudes["absmax"] == 0, 1.0, np.minimum(scales, 2.0**127)).astype(np.float32)
        if self._keeps_all:
            scales = np.where(parts["last_bit"].numpy() / scales > 0, scales, np.float32(1))
        stored = torch.from_numpy(scales)
        is_short = self.grain.fits(self.format) and not is_pow2  # readers may keep them in bf16
        return stored.bfloat16().float() if is_short else stored


@functools.lru_cache(maxsize=8)
def _counts(matrix: tuple[int, int], tile: tuple[int, int]) -> Array:
    """Number of elements of each tile of a matrix, in fp32: [tiles along rows, tiles along columns].

    Tiles of one row have the same number in every row, so there is a single one: [1, tiles along columns].
    """
    sizes = ((1 if tile[0] == 1 else matrix[0], tile[0]), (matrix[1], tile[1]))
    rows, cols = (np.minimum(whole - np.arange(0, whole, n), n).astype(np.float32) for whole, n in sizes)
    return np.multiply.outer(rows, cols)


def dividing_factor(format: Format, largest: float, *, pow2: bool) -> Tensor:
    """Divisor of the e4m3fn scales of groups of numbers up to `largest`, fp32 [1]; 1 if all are zero."""
    factor = min(_OF_SCALES.max * format.max / largest, 2.0**127) if largest else 1.0
    return torch.tensor([pow2_floor(factor) if pow2 else factor], dtype=torch.float32)


def _norm(x: Tensor, spare: Tensor) -> Tensor:
    """Norm along the last axis, in fp64, computed in as many rows at a time as fit into `spare`.

    A new buffer for each block, freed between results that are kept, would fragment the heap.
    """
    room = spare.view(torch.float64)
    norms_of_rows = torch.empty(x.shape[:-1], dtype=torch.float64)
    count = max(room.numel() // max(x[:1].numel(), 1), 1)
    for part, norms in zip(torch.split(x, count), torch.split(norms_of_rows, count), strict=True):
        wide = room[: part.numel()].view(part.shape).copy_(part) if part.numel() <= room.numel() else part.double()
        torch.linalg.vector_norm(wide, dim=-1, out=norms)
    return norms_of_rows


def _last_bits(x: Tensor) -> Tensor:
    """Value of the lowest set bit of each fp32 number, infinity for zeros.

    Dividing by a power of two is exact as long as this does not become zero.
    """
    bits = x.view(torch.int32)
    others = (bits & (bits - 1)).view(torch.float32)
    values = torch.where(bits & 0x7FFFFF == 0, x, x - others).abs()
    return values.masked_fill_(x == 0, math.inf)


# How statistics of rows combine to statistics of a tile.
_JOIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "absmax": lambda x: x.amax(0),
    "positive": lambda x: x.amax(0),
    "negative": lambda x: x.amax(0),
    "norm": lambda x: x.square().sum(0).sqrt(),
    "missing": lambda x: x.sum(0),
    "last_bit": lambda x: x.amin(0),
}


def candidates(stored: Tensor, format: Format) -> list[Tensor]:
    """Scales to try for each group, as stored, the given ones first; their dtype tells what a file can represent."""
    if stored.dtype == torch.uint8:  # exponents of two
        others = [(stored.int() + step).clamp_(1, 254).to(torch.uint8) for step in _EXPONENTS]
    elif stored.dtype == torch.float8_e4m3fn:
        codes = stored.view(torch.uint8).int()
        others = [(codes + n).clamp_(1, 126).to(torch.uint8).view(stored.dtype) for n in _NEIGHBOURS if n]
    elif stored.dtype == torch.float16:  # those of 4-bit codes have a sign
        signs = (1, -1) if format.storage_bits == 4 else (1,)
        multiples = [m * sign for m in _CLIPPING[format.storage_bits] for sign in signs]
        others = [(stored.float() * m).half() for m in multiples if m != 1]
    else:
        multiples = list(_CLIPPING[format.storage_bits] if format.twos_complement else _WITHIN_BINADE)
        others = [(stored.float() * m).clamp_(*_SCALES).bfloat16().to(stored.dtype) for m in multiples if m != 1]
    return [stored, *others]


@dataclass(frozen=True, kw_only=True)
class ScaleSearch:
    """Finds the best scales of the tiles that have usual ones by `rule`.

    `factor_of(stored, start, stop)` expands stored scales for the elements `start` to `stop`, to [rows, tiles, 1] or
    [rows, cols]: what their codes are multiplied by. `importance` weights the squared error of each column: fp32
    [cols], or [matrices, cols] if the rows belong to several matrices.
    """

    rule: TileScales
    factor_of: Callable[[Tensor, int, int], Tensor]
    importance: Tensor | None = None

    def in_rows(self, x: Tensor, usual: Tensor, work: Workspace, start: int = 0) -> Tensor:
        """The best scales, as stored, for a block (1-D) from element `start` on, whose tiles are parts of one row."""
        tried = candidates(usual, self.rule.format)
        factors = self.factor_of(torch.cat(tried), 0, len(tried) * len(x))
        return best_scales(tried, self._errors(x, start, torch.split(factors, len(usual)), work))

    def over_blocks(self, over: Over, usual: Tensor) -> Tensor:
        """The best scales, as stored, for all tiles; blocks may end within tiles of several rows."""
        height, cols = self.rule.grain.sizes(*self.rule.matrix)[0], self.rule.matrix[1]
        if height == 1:

            def find(x: Tensor, start: int, work: Workspace) -> Tensor:
                return self.in_rows(x, usual[start // cols : (start + len(x)) // cols], work, start)

            return torch.cat(list(over(find)))
        tried = candidates(usual, self.rule.format)
        sums = torch.zeros((len(tried), *usual.shape), dtype=torch.float64)

        def add(x: Tensor, start: int, work: Workspace) -> tuple[int, Tensor]:
            tile_of_row = torch.arange(start // cols, (start + len(x)) // cols) // height
            first = int(tile_of_row[0])
            num_rows = torch.bincount(tile_of_row - first).tolist()
            factors = [self.factor_of(scales, start, start + len(x)) for scales in tried]
            errors = torch.stack(self._errors(x, start, factors, work)).double()
            return first, torch.stack([part.sum(1) for part in torch.split(errors, num_rows, 1)], 1)

        for first, errors in over(add):
            sums[:, first : first + errors.shape[1]] += errors
        return best_scales(tried, list(sums))

    def _weights(self, start: int, count: int) -> Tensor | None:
        """The importance of `count` elements from `start` on, [cols] or [rows, cols]."""
        if self.importance is None or self.importance.ndim == 1:
            return self.importance
        num_rows, cols = self.rule.matrix
        rows = torch.arange(start // cols, (start + count) // cols)
        return self.importance[rows * len(self.importance) // num_rows]

    def _errors(self, x: Tensor, start: int, factors: Sequence[Tensor], work: Workspace) -> list[Tensor]:
        """Σ weight · (x - code · factor)² for each tile's part of the rows of a block (1-D), [rows, tiles] each."""
        weights, sums = self._weights(start, len(x)), []
        rows = as_float32(x, work).view(-1, self.rule.matrix[1])
        tiled = rows.view(*factors[0].shape[:-1], -1)
        error = work.scratch.coded[: len(x)].view(tiled.shape)
        squares = error.view(rows.shape)
        for factor in factors:
            nearest_code_(torch.div(tiled, factor, out=error), self.rule.format).mul_(factor).sub_(tiled).square_()
            weighted = squares if weights is None else squares.mul_(weights)
            sums.append(self.rule.reduce_columns(weighted, lambda t: t.sum(-1)))
        return sums


def best_scales(tried: Sequence[Tensor], errors: Sequence[Tensor]) -> Tensor:
    """The scale with the least error for each group, the first one in a tie; errors may be NaN."""
    chosen_scales, least = tried[0].view(torch.uint8) if tried[0].itemsize == 1 else tried[0], errors[0]
    for scales, error in zip(tried[1:], errors[1:], strict=True):
        is_better = error < least
        chosen_scales = torch.where(is_better, scales.view(chosen_scales.dtype), chosen_scales)
        least = torch.where(is_better, error, least)
    return chosen_scales.view(tried[0].dtype)
