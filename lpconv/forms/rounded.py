"""A tensor whose codes were chosen with error feedback, so that no pass over the source gives them again.

Its form is that of any other tensor, but its codes come from a file, either of an unfinished conversion or of the
output itself, and writing or checking them reads that file.
"""

from __future__ import annotations  # tensors are named below and not imported

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.formats.spec import Format
from lpconv.forms.facts import (
    BlockError,
    BlockFacts,
    BlockStats,
    EncodedBlock,
    FormSettings,
    Measurement,
    block_ranges,
)
from lpconv.forms.form import Fetch, Form, Over, Side
from lpconv.results import RoundingRecord

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace

_SLACK = 1e-5  # tolerance of a distance in units of the scale, computed in fp32


def _of_inner(name: str) -> Any:
    """An attribute or method of `Rounded.inner`."""
    return property(lambda form: getattr(form.inner, name))


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounded(Form):
    """The form `inner` with data from `fetch` and side tensors `held`; `record` describes the rounding."""

    kind: ClassVar[str] = "rounded"

    inner: Form
    fetch: Fetch
    held: Side
    record: RoundingRecord

    @classmethod
    def around(cls, inner: Form, fetch: Fetch, held: Side, record: RoundingRecord) -> Self:
        """Wrap the form `inner` that the tensor would have without feedback."""
        assert inner.takes_codes, inner
        return cls(
            name=inner.name,
            shape=inner.shape,
            format=inner.format,
            inner=inner,
            fetch=fetch,
            held=held,
            record=record,
        )

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        raise NotImplementedError("a plan gives the form without feedback")

    words, components, data, side, late_side = map(_of_inner, ("words", "components", "data", "side", "late_side"))
    cols, place, scale, decode, side_in = map(_of_inner, ("cols", "place", "scale", "decode", "side_in"))
    has_input_scale = _of_inner("has_input_scale")

    @property
    def nearest(self) -> Form:
        return self.inner

    @property
    def rounding(self) -> RoundingRecord:
        return self.record

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        return Measurement(stats=sum((each.stats for each in looked), BlockStats()), side=self.held)

    def begin(self, largest: float) -> Measurement:
        return Measurement(side=self.held, is_guess=True)

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        """The codes that were chosen, and their error against the source's `x`.

        Zeros may have become other numbers. That has no relative error, and is not taken for an overflow.
        """
        from lpconv.forms.blocks import as_float32, block_error, block_stats

        data = self.read(self.fetch, start, start + x.numel(), self.held)
        value, got = as_float32(x, work), self.decode(data, start, start + x.numel(), self.held)
        moved = got.masked_fill(value != 0, 0.0)
        error = block_error(value, got.sub_(moved))
        stats = None if self.side else block_stats(x, work)
        return EncodedBlock(data=data, stats=stats, error=error + BlockError(sum_squares=float(moved.square_().sum())))

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        """Whether numbers are on the grid, by the slow reference, and no further from the source than recorded."""
        scales = self.inner.scale_of_each(side, start, start + value.numel())
        distance = float((value - got).div_(scales).abs_().amax()) if value.numel() else 0.0
        return distance <= self.record.max_steps + _SLACK and self.inner.is_right(got, got, start, side)


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
