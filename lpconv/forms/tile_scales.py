"""The scales of tiles, from one pass over the weights.

Each row's part of each tile is looked at alone; tiles of several rows are put together of these when all rows are
known. So blocks may end within tiles, and no more than whole rows need be in memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.formats.grains import Grain
from lpconv.formats.scale import pow2_ceil, pow2_floor
from lpconv.formats.spec import FORMATS, Format

__all__ = ["Parts", "TileScales"]

# What rows have of tiles, by what it is: [rows, tiles beside each other].
Parts = Mapping[str, Tensor]
_WIDE = 64  # columns from which on torch compares integers of 16 bits as fast as others


@dataclass(frozen=True, kw_only=True)
class TileScales:
    """The rule for the scales of a matrix of so many rows and columns, whose codes are numbers of `format`."""

    grain: Grain
    format: Format
    matrix: tuple[int, int]
    has_pow2_scale: bool

    @property
    def _keeps_all(self) -> bool:
        """Whether codes promise the source's bits back."""
        return self.format.name == "fp32" and self.has_pow2_scale

    def parts(self, x: Tensor, value: Tensor, spare: Tensor) -> tuple[Parts, float]:
        """What some rows have of each tile: the largest magnitude, and what the rule needs beside it. NaN and Inf count
        as nothing, but for the largest magnitude of all, which is returned, too.

        `x` and `value` [rows, cols] are the same numbers in their own dtype and in fp32; `spare` is an fp32 buffer of
        that size.
        """
        absmax = self._absmax(x if x.itemsize == 2 and self._width >= _WIDE else value, spare)
        largest = float(absmax.max()) if absmax.numel() else 0.0
        is_finite = math.isfinite(largest)
        if not is_finite:
            finite = torch.isfinite(value)
            value = value.masked_fill(~finite, 0.0)
            absmax = self._absmax(value, spare)
        parts = {"absmax": absmax}
        if not self.grain.is_fitted:
            parts["norm"] = self._cut(value, lambda t: torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64))
            counted = torch.ones(1, self.matrix[1]) if is_finite else finite.float()
            parts["count"] = self._cut(counted, lambda t: t.sum(-1)).expand(len(value), -1)
        if self._keeps_all:
            parts["last_bit"] = self._cut(_last_bits(value), _amin)
        return parts, largest

    def joined(self, found: Sequence[Parts]) -> Parts:
        """The parts of all rows as those of tiles: [tiles below each other, tiles beside each other]."""
        return {k: self._rows(torch.cat([p[k] for p in found]), f) for k, f in _JOIN.items() if k in found[0]}

    def stored(self, parts: Parts, largest: float) -> tuple[Tensor, Tensor | None]:
        """The scales as they are stored, and the one that divides them where the grain has that; `largest` is the
        largest magnitude of all weights that share it."""
        if self.grain.has_factor:
            return self._divided(parts["absmax"], largest)
        scales = self._scales(parts)
        is_exponent = self.grain.scale_dtype == "U8"
        return (scales.view(torch.int32) >> 23).to(torch.uint8) if is_exponent else scales, None

    def _absmax(self, x: Tensor, spare: Tensor) -> Tensor:
        """The largest magnitudes of [rows, cols] in fp32: without a sign the bits of numbers are ordered as these are,
        and torch compares integers faster."""
        integer = torch.int16 if x.itemsize == 2 else torch.int32
        bits = spare.view(integer)[: x.numel()].view(x.shape)
        torch.bitwise_and(x.view(integer), torch.iinfo(integer).max, out=bits)
        return self._cut(bits, _amax).view(x.dtype).float()

    @property
    def _width(self) -> int:
        """Columns of a tile."""
        return self.grain.sizes(*self.matrix)[1]

    def _cut(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows [h, cols] reduced over the part that each tile has of them: [h, tiles]."""
        cols, width = x.shape[1], self._width
        whole = cols // width * width
        cut = [reduce(x[:, :whole].view(len(x), -1, width))] if whole else []
        return torch.cat([*cut, reduce(x[:, whole:].unsqueeze(1))], 1) if whole < cols else cut[0]

    def _rows(self, parts: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """The parts of rows [rows, tiles] reduced over the rows of a tile."""
        height, _ = self.grain.sizes(*self.matrix)
        return parts if height == 1 else torch.stack([reduce(p) for p in torch.split(parts, height)])

    def _scales(self, parts: Parts) -> Tensor:
        """The scale of each tile in fp32. One of zeros has 1.

        For formats of few exponents a tile's largest magnitude becomes the format's largest number, or less where the
        scale is a power of two, rounded up so that nothing is clipped (RCEIL); for others as `scale_for` has it.
        """
        is_pow2 = self.has_pow2_scale or self.grain.scale_dtype == "U8"
        # Division in fp32 keeps numbers on their side of a power of two; those that are no powers are rounded once.
        absmax = parts["absmax"] if is_pow2 else parts["absmax"].double()
        floor = (absmax / self.format.max).clamp_min_(2.0**-126)
        scales = pow2_ceil(floor) if is_pow2 else floor
        if not self.grain.is_fitted:
            rms = parts["norm"] / parts["count"].clamp_min(1).sqrt()
            scales = torch.maximum(pow2_floor(rms) if is_pow2 else rms, scales.double())
        scales = torch.where(parts["absmax"] == 0, 1.0, scales.clamp_max(2.0**127)).float()
        if self.grain.is_fitted and not is_pow2:
            scales = scales.bfloat16().float()  # in which readers may keep them
        if self._keeps_all:
            scales = torch.where(parts["last_bit"] / scales > 0, scales, 1.0)
        return scales

    def _divided(self, absmax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
        """Scales in e4m3fn, and the one that divides them: it makes the largest scale the format's largest number, or
        less where it is a power of two. Scales are rounded to nearest, as NVIDIA's recipe and torchao have it."""
        of_scales = FORMATS["e4m3fn"]
        factor = min(of_scales.max * self.format.max / largest, 2.0**127) if largest else 1.0
        factor = pow2_floor(factor) if self.has_pow2_scale else factor
        one = torch.tensor([factor], dtype=torch.float32)
        scales = (absmax.double() / self.format.max * one.double()).float()
        return scales.clamp(of_scales.min_subnormal, of_scales.max).to(torch.float8_e4m3fn), one


def _amax(x: Tensor) -> Tensor:
    return x.amax(-1)


def _amin(x: Tensor) -> Tensor:
    return x.amin(-1)


def _last_bits(x: Tensor) -> Tensor:
    """What the last bit that is set stands for in each fp32 number, infinity for zeros: dividing by a power of two is
    exact as long as this does not become zero."""
    bits = x.view(torch.int32)
    others = (bits & (bits - 1)).view(torch.float32)
    found = torch.where(bits & 0x7FFFFF == 0, x, x - others).abs()
    return found.masked_fill_(x == 0, math.inf)


# How what rows have of a tile makes what the tile has.
_JOIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "absmax": lambda x: x.amax(0),
    "norm": lambda x: x.square().sum(0).sqrt(),
    "count": lambda x: x.sum(0),
    "last_bit": lambda x: x.amin(0),
}
