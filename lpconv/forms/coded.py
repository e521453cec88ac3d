"""Codes with scales, value = scale · code, and the part that replaces their source if error feedback chose them.

Usually, codes are the numbers nearest to the source, with scales that follow from it, too. Codes that were chosen with
error feedback follow from no pass over the source: they are in a file, either of an unfinished conversion or of the
output itself, and writing or checking them reads that file.
"""

from __future__ import annotations  # tensors are named below and not imported

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from lpconv.formats.spec import Format
from lpconv.forms.facts import BlockError, BlockFacts, BlockStats, EncodedBlock, Measurement, block_ranges
from lpconv.forms.form import Fetch, Form, Over, Side
from lpconv.forms.grid import Grid
from lpconv.results import RoundingRecord

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace

_SLACK = 1e-5  # tolerance of a distance in units of the scale, computed in fp32


@dataclass(frozen=True, kw_only=True)
class ChosenCodes:
    """Codes from `fetch` with the side tensors `side`; `record` describes the rounding."""

    fetch: Fetch
    side: Side
    record: RoundingRecord

    def encode(self, form: Form, x: Tensor, start: int, work: Workspace) -> EncodedBlock:
        """The stored codes, and their error against the source's `x`.

        Zeros may have become other numbers. That has no relative error, and is not taken for an overflow.
        """
        from lpconv.forms.blocks import as_float32, block_error, block_stats

        stop = start + x.numel()
        data = form.read(self.fetch, start, stop, self.side)
        value, got = as_float32(x, work), form.decode(data, start, stop, self.side)
        moved = got.masked_fill(value != 0, 0.0)
        error = block_error(value, got.sub_(moved))
        stats = None if form.side else block_stats(x, work)
        return EncodedBlock(data=data, stats=stats, error=error + BlockError(sum_squares=float(moved.square_().sum())))


@dataclass(frozen=True, kw_only=True)
class CodedForm(Form):
    """Codes with scales. `has_pow2_scale` makes `measure` choose powers of two. `chosen` are codes that are given."""

    format: Format
    has_pow2_scale: bool = True
    chosen: ChosenCodes | None = field(default=None, compare=False, repr=False)

    @property
    def takes_codes(self) -> bool:
        return True

    def with_codes(self, fetch: Fetch, side: Side, record: RoundingRecord) -> Self:
        return replace(self, chosen=ChosenCodes(fetch=fetch, side=side, record=record))

    @property
    def nearest(self) -> Self:
        return replace(self, chosen=None)

    @property
    def rounding(self) -> RoundingRecord | None:
        return None if self.chosen is None else self.chosen.record

    @property
    def grid(self) -> Grid | None:
        """The codes and scales as a `Grid`; None if they are no matrix."""
        return None

    @property
    def packed(self) -> str:
        """The format of packed codes, or ""."""
        return ""

    def codes_in(self, data: Sequence[Tensor]) -> Tensor:
        """The codes in stored data, in the dtype of the format, or packed."""
        return data[0]

    def as_stored(self, codes: Tensor, start: int, side: Side, work: Workspace) -> Tensor:
        """The data to store for codes of the encoder, from element `start` on."""
        return codes

    @abstractmethod
    def code_scale(self, side: Side, start: int, stop: int) -> float | Tensor: ...

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        stats = sum((each.stats for each in looked), BlockStats())
        if self.chosen is not None:
            return Measurement(stats=stats, side=self.chosen.side)
        return self._combine(BlockFacts(stats=stats, more=[each.more for each in looked]), over, fused)

    def _combine(self, looked: BlockFacts, over: Over, fused: Sequence[Over]) -> Measurement:
        """`combine` for codes that follow from the source, given the statistics of all blocks and their other facts."""
        raise NotImplementedError(self.words)

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        from lpconv.forms.codes import encode

        if self.chosen is not None:
            return self.chosen.encode(self, x, start, work)
        scale = self.code_scale(measured.side, start, start + x.numel())
        codes, error = encode(x, scale, self.format, work, measured.stats)
        return EncodedBlock(data=(self.as_stored(codes, start, measured.side, work),), error=error)

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        from lpconv.forms.codes import decode

        return decode(self.codes_in(data), self.code_scale(side, start, stop), self.packed)

    def decode_to(self, out: Tensor, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        from lpconv.forms.codes import decode_to

        return decode_to(out, self.codes_in(data), self.code_scale(side, start, stop), self.packed)

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        """Whether numbers are those of the slow reference.

        Given codes are on its grid, and no further from the source than recorded.
        """
        from lpconv.forms.blocks import same_numbers
        from lpconv.forms.codes import reference_values

        stop = start + value.numel()
        if self.chosen is not None and value.numel():
            distance = float((value - got).div_(self.scale_of_each(side, start, stop)).abs_().amax())
            if distance > self.chosen.record.max_steps + _SLACK:
                return False
        wanted = value if self.chosen is None else got
        return same_numbers(got, reference_values(wanted, self.code_scale(side, start, stop), self.format))

    def confirms(self, x: Tensor, data: Sequence[Tensor], start: int, side: Side, work: Workspace) -> bool:
        from lpconv.forms.codes import are_reference_codes

        if not self.packed and self.chosen is None:
            scale = self.code_scale(side, start, start + x.numel())
            if are_reference_codes(x, self.codes_in(data), scale, self.format, work):
                return True
        return super().confirms(x, data, start, side, work)

    def rows_of_scales(self, side: Side) -> Tensor | None:
        import torch

        if self.chosen is not None or not side:
            return None
        scales = self.code_scale(side, 0, self.num_elements)
        return torch.tensor([[scales]], dtype=torch.float32) if isinstance(scales, float) else scales


def bytes_on_grid(form: Form, values: Tensor, start: int, measured: Measurement, work: Workspace) -> Tensor:
    """The stored bytes of numbers on the form's grid (fp32, 1-D), from element `start` on."""
    import torch

    data = []
    for first, last in block_ranges(len(values), form.cols):
        codes = form.encode(values[first:last], start + first, measured, work).data
        got = form.decode(codes, start + first, start + last, measured.side)
        assert torch.equal(got, values[first:last]), form.name
        data.append(codes[0].view(torch.uint8).clone())
    return torch.cat(data)


def digest_of(stored: Mapping[str, Tensor]) -> str:
    """SHA-256 of all stored components of a tensor, in the order of their names."""
    import torch

    digest = hashlib.sha256()
    for _, part in sorted(stored.items()):
        digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
