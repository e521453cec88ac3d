"""What a repair makes of one weight, with what that changes of its numbers: see `repair.py`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.checkpoint.header import TensorInfo
from lpconv.checkpoint.source import Source, read_range, read_tensor
from lpconv.convert.scales import fetch_from, side_of
from lpconv.convert.tensor_records import sqnr_db
from lpconv.formats.narrow import packed
from lpconv.formats.spec import FORMATS
from lpconv.forms import Component
from lpconv.forms.blocks import block_error
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.foreign.plane import Span
from lpconv.forms.ranges import block_ranges
from lpconv.results import RepairedTensor

__all__ = ["Changes", "Mend", "pieces"]


@dataclass(frozen=True, kw_only=True)
class Mend:
    """What becomes of one weight. `is_inverted` says that its scale is to be replaced by the reciprocal; `new` is the
    one scale it gets then, and `old` the one it had, None where each block has its own."""

    grid: Grid
    is_inverted: bool
    old: float | None
    new: float | None

    @property
    def stored(self) -> Component:
        """What holds the one scale, or those of all blocks."""
        return self.grid.factor or self.grid.scales.component

    @property
    def can_rescale(self) -> bool:
        """Whether codes can take up a factor: no zero points beside them, no words of integers."""
        return self.grid.zeros is None and self.grid.codes.kind in ("fp8", "e2m1", "wide")

    @property
    def ratio(self) -> float:
        """By what numbers would grow if nothing but the one scale changed; at least 1."""
        if self.old is None or self.new is None:
            return 1.0
        return self.old / self.new if self.grid.divides else self.new / self.old

    def one(self, raw: Tensor) -> Tensor:
        """The factor, or the plane of scales where there is none, as it will be stored."""
        if self.new is not None:
            return torch.full_like(raw, self.new)
        return raw.reciprocal() if self.is_inverted else raw

    def scales(self, raw: Tensor) -> Tensor:
        """Some of the plane of scales."""
        if self.grid.factor is None:
            return self.one(raw)
        if self.ratio == 1:
            return raw
        least = FORMATS["e4m3fn"].min_subnormal  # a group keeps a scale
        return torch.where(raw.float() == 0, 0.0, (raw.float() / self.ratio).clamp_min(least)).to(raw.dtype)

    def codes(self, raw: Tensor, scales: Tensor, span: Span) -> tuple[Tensor, Tensor, Tensor]:
        """The codes of a span with these scales, as stored; and its numbers before and after, in fp32."""
        grid = self.grid
        was, now = self._factors(scales, span, self.old), self._factors(self.scales(scales), span, self.new)
        before = grid.codes.numbers(raw, span)
        unit = before * torch.where(now == 0, 0.0, was / now)
        if bool((was == now).all()):
            made = raw
        elif grid.codes.kind == "e2m1":
            made = packed(unit.reshape(-1), FORMATS["e2m1"]).view(raw.shape)
        else:  # integers are cut by a cast, fp8 is rounded
            unit = unit.round_() if raw.dtype == torch.int8 else unit
            made = unit.clamp_(*grid.codes.ends).to(raw.dtype)
        return made, before * was, grid.codes.numbers(made, span) * now

    def _factors(self, scales: Tensor, span: Span, one: float | None) -> Tensor:
        grid = self.grid
        if grid.factor is None:
            return torch.full((1, 1), one or 0.0)
        return grid.factors(scales, span, {grid.factor.name: torch.tensor([one or 0.0])})


@dataclass
class Changes:
    """Of the numbers of one weight: Σx² before, Σ(y - x)², the largest |y - x| / |x|, and how many are others."""

    signal: float = 0.0
    noise: float = 0.0
    relative: float = 0.0
    num: int = 0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Count some more."""
        self.num += int((before != after).sum())
        known = before.nan_to_num().reshape(-1)
        self.signal += float(torch.dot(known.double(), known.double()))
        error = block_error(known, after.nan_to_num().reshape(-1).clone())
        self.noise += error.sum_squares
        self.relative = max(self.relative, error.max_relative)

    def record(self, name: str, mend: Mend, before: float | None) -> RepairedTensor:
        """What became of a weight whose one scale was `before`."""
        return RepairedTensor(
            name=name,
            what="inverted" if mend.is_inverted else "rescaled",
            before=before,
            after=mend.new,
            num_elements=mend.grid.num_elements,
            num_changed=self.num,
            max_rel_error=self.relative,
            sqnr_db=sqnr_db(self.signal, self.noise),
        )


def pieces(
    source: Source, info: TensorInfo, mends: Mapping[str, Mend], changes: Mapping[str, Changes]
) -> Iterator[Tensor]:
    """The data of one stored tensor as they will be, block by block; `changes` count what becomes of numbers."""
    for name, mend in mends.items():
        if info.name == mend.stored.name:
            yield mend.one(read_tensor(source, info.name))
            return
        if mend.ratio != 1 and info.name == mend.grid.codes.component.name:
            yield from _recoded(source, mend, changes[name])
            return
        if mend.ratio != 1 and info.name == mend.grid.scales.component.name:
            for start, stop in block_ranges(info.num_elements, 8):
                yield mend.scales(read_range(source, info.name, start, stop))
            return
    for start, stop in block_ranges(info.num_bytes, 8):
        raw = torch.empty(stop - start, dtype=torch.uint8)
        source.read_bytes(info.name, start, raw.numpy().data)
        yield raw


def _recoded(source: Source, mend: Mend, changes: Changes) -> Iterator[Tensor]:
    grid, fetch, side = mend.grid, fetch_from(source), side_of(mend.grid, source)
    for start, stop in block_ranges(grid.num_elements, grid.cols):
        for span in grid.spans(start, stop):
            made, before, after = mend.codes(grid.codes.fetch(fetch, span), grid.scales.fetch(fetch, span), span)
            changes.add(grid.with_columns(before, side), grid.with_columns(after, side))
            yield made
