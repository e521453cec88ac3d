"""A third-party weight: value = (code - zero point) · scale, with scales for a tensor, rows, blocks or groups.

All readable layouts share this arithmetic over `Plane`s; `lpconv.layouts` defines where these are stored. A weight may
be transposed in the file (GPTQ, AWQ, the experts of gpt-oss): then a band of its rows is a band of the file's columns,
read row by row, and `cols` is the size of a band, so that no read is too small.

Values are computed in fp32: codes and zero points are small integers or fp8, whose difference is exact, and the product
with the scale is rounded once. A scale of two factors (NVFP4) is their product or quotient in fp32, as in its readers.
If readers first multiply inputs by a number per column (AWQ), that number is folded into the weight: value[n, k] =
(code[n, k] · scale) · column[k], since (code · scale) · (x[k] · column[k]) equals that times x[k]. The second product
is rounded, too.
"""

from __future__ import annotations  # tensors are named below and not imported

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpconv.formats.spec import Format
from lpconv.forms.facts import Component
from lpconv.forms.form import Fetch, Side, Stored
from lpconv.forms.planes import SHORT, Plane, Span, one_by_one

if TYPE_CHECKING:
    from torch import Tensor


_WIDE, _INTEGERS = {"F32", "F16", "BF16"}, {"I32", "I64"}
FP8_BLOCK = (128, 128)  # the usual block of fp8; the last ones may be smaller
_BAND = 2**21  # numbers of a transposed weight that are read at once


@dataclass(frozen=True, kw_only=True)
class Grid(Stored):
    """A third-party weight. `factor` is one more scale for the tensor; with `divides` it is a divisor.

    `order` has the group of each column, if groups are not contiguous. `size` is a tensor that repeats the shape of the
    weight. `columns` has the factor of each column by which readers multiply inputs; `cancelling` is a factor that
    readers divide by and multiply by again, so that values do not depend on it. `is_transposed` means that the file has
    the transpose.
    """

    format: Format
    codes: Plane
    scales: Plane
    zeros: Plane | None = None
    factor: Component | None = None
    divides: bool = False
    order: Component | None = None
    size: Component | None = None
    columns: Component | None = None
    cancelling: Component | None = None
    is_transposed: bool = False

    @property
    def words(self) -> str:
        rows, cols = self.block
        shape = "the tensor" if (rows, cols) == self.matrix else "a row" if (rows, cols) == (1, self.matrix[1]) else ""
        shape = shape or (f"{cols} of a row" if rows == 1 else f"{rows} x {cols}")
        return f"{self.format.name} codes, a scale for {shape}" + (", a factor for each column" if self.columns else "")

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one matrix of the weight."""
        return self.shape[-2], self.shape[-1]

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of the weight that share a scale."""
        rows, cols = self.scales.block[::-1] if self.is_transposed else self.scales.block
        return min(rows, max(self.matrix[0], 1)), min(cols, max(self.matrix[1], 1))

    @property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(p for p in (self.codes, self.scales, self.zeros) if p is not None)

    @property
    def data(self) -> tuple[Component, ...]:
        return tuple(p.component for p in self.planes)

    @property
    def side(self) -> tuple[Component, ...]:
        parts = (self.factor, self.order, self.size, self.columns, self.cancelling)
        return tuple(c for c in parts if c is not None)

    @property
    def components(self) -> tuple[Component, ...]:
        return (*self.data, *self.side)

    @property
    def cols(self) -> int:
        rows, cols = self.matrix
        if not self.is_transposed:
            return cols
        band = min(rows, max(_BAND // cols // 32, 1) * 32)
        if len(self.shape) > 2:  # bands must not reach from one matrix into the next
            band = next(n for n in range(band, 0, -1) if rows % n == 0)
        return band * cols

    @property
    def agrees(self) -> bool:
        lead, matrix = math.prod(self.shape[:-2]), self.matrix[::-1] if self.is_transposed else self.matrix
        order, size, columns = self.order, self.size, self.columns
        ones = [c for c in (self.factor, self.cancelling) if c is not None]
        return (
            0 not in self.shape
            and all(p.holds(matrix) and math.prod(p.component.shape[:-2]) == lead for p in self.planes)
            and all(math.prod(c.shape) == 1 and c.dtype in _WIDE for c in ones)
            and (columns is None or (columns.shape == self.shape[1:] and columns.dtype in _WIDE))
            and (order is None or (order.shape == self.matrix[1:] and order.dtype in _INTEGERS))
            and (size is None or (size.shape == (len(self.shape),) and size.dtype in _INTEGERS))
        )

    def is_valid_side(self, side: Side) -> bool:
        return next(self.side_problems(side), None) is None

    def side_problems(self, side: Side) -> Iterator[str]:
        """Contradictions of the side tensors, as text: a wrong shape, groups without a scale, impossible factors."""
        if self.size is not None and (shape := tuple(side[self.size.name].tolist())) != self.shape:
            yield f"`{self.size.name}` says {shape}, but the codes have shape {self.shape}"
        if self.order is not None:
            groups, order = self.scales.size[0 if self.is_transposed else 1], side[self.order.name]
            if not bool(((order >= 0) & (order < groups)).all()):
                yield f"`{self.order.name}` refers to groups without a scale"
        factors = [c.name for c in (self.factor, self.columns, self.cancelling) if c is not None]
        wrong = next((name for name in factors if not is_positive(side[name])), None)
        if wrong is not None:
            yield f"`{wrong}` is zero, negative or not finite"

    def read(self, fetch: Fetch, start: int, stop: int, side: Side) -> tuple[Tensor, ...]:
        return tuple(p.fetch(fetch, span) for span in self.spans(start, stop) for p in self.planes)

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        import torch

        raw = iter(data)
        pieces = [self._values([next(raw) for _ in self.planes], span, side) for span in self.spans(start, stop)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.empty(0)

    def decode_to(self, out: Tensor, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        from lpconv.forms.codes import decode_to

        spans = tuple(self.spans(start, stop))
        plain = self.codes.kind in SHORT and self.zeros is None and self.order is None and self.columns is None
        plain = plain and not self.is_transposed and out.dtype.itemsize <= 4 and len(spans) == 1
        if not plain or self.matrix[1] % max(self.block[1], self.codes.group[0]):
            return super().decode_to(out, data, start, stop, side)
        (span,) = spans
        scales = self.scales.expand_rows(self.scales_of(data[1], span, side), span).expand(span.shape[0], -1)
        return decode_to(out, data[0].reshape(-1), scales.unsqueeze(2), "e2m1" if self.codes.kind == "e2m1" else "")

    def scales_of(self, raw: Tensor, span: Span, side: Side) -> Tensor:
        """The scales of the blocks in a span, fp32, including the tensor's factor."""
        return self.with_factor(self.scales.numbers(raw, span), side)

    def with_factor(self, scales: Tensor, side: Side) -> Tensor:
        """fp32 scales multiplied or divided by the tensor's factor, if there is one."""
        if self.factor is None:
            return scales
        factor = side[self.factor.name].float().reshape(())
        return scales / factor if self.divides else scales * factor

    def _values(self, raw: Sequence[Tensor], span: Span, side: Side) -> Tensor:
        x = self.codes.numbers(raw[0], span)
        if self.zeros is not None:
            x = x - self.spread(self.zeros, self.zeros.numbers(raw[2], span), span, side)
        x = x * self.spread(self.scales, self.scales_of(raw[1], span, side), span, side)
        x = x.t() if self.is_transposed else x
        return (x if self.columns is None else x * side[self.columns.name].float()).reshape(-1)

    def spread(self, plane: Plane, x: Tensor, span: Span, side: Side) -> Tensor:
        """Expand numbers of groups to the elements of a span, which contains all groups since they run along rows."""
        if self.order is None:
            return plane.spread(x, span)
        order = side[self.order.name].long()
        return x[order] if self.is_transposed else x[:, order]

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yield a `Span` per matrix for the elements `start` to `stop`, which are whole rows."""
        rows, cols = self.matrix
        first, last = (start // cols, stop // cols) if cols else (0, 0)
        while first < last:
            index, row = divmod(first, rows)
            count = min(rows - row, last - first)
            if self.is_transposed:
                yield Span(index=index, top=0, bottom=cols, left=row, right=row + count)
            else:
                yield Span(index=index, top=row, bottom=row + count, left=0, right=cols)
            first += count


def is_positive(x: Tensor) -> bool:
    """Whether all numbers are positive and finite."""
    return bool(((x > 0) & (x < math.inf)).all())


def block_hint(value: object) -> tuple[int, int] | None:
    """The block size that a config names, or None for anything but two positive sizes."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        return None
    return value[0], value[1]


def grid_of_blocks(
    name: str,
    shape: tuple[int, ...],
    format: Format,
    codes: Plane,
    scale: Component,
    hint: tuple[int, ...] = (),
    *,
    factor: Component | None = None,
    divides: bool = False,
) -> Grid | None:
    """A weight with a scale for each block of rows and columns; None if the scales do not fit.

    `hint` is the config's block size: the last blocks may be smaller, which the sizes alone do not tell.
    """
    block = []
    for n, num_scales, hinted in zip(shape[-2:], one_by_one(scale).size, hint or (0, 0), strict=True):
        if hinted and -(-n // hinted) == num_scales:
            block.append(hinted)
        elif num_scales and n % num_scales == 0:
            block.append(n // num_scales)
        else:
            return None
    scales = one_by_one(scale, (block[0], block[1]))
    return Grid(name=name, shape=shape, format=format, codes=codes, scales=scales, factor=factor, divides=divides)
