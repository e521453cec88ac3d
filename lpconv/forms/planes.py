"""A matrix of numbers in a third-party file: codes, scales or zero points, one by one or packed into words.

Each number of a `Plane` belongs to a block of a weight's elements, so that a scale of 128 x 128 elements, a zero point
of a group and a code of one element are read by the same few lines. Everything is in the order of the file, in which a
weight may be transposed; `PlaneNames` has the names there. Letters: a weight has P x Q numbers, a plane H x W elements
in the file.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpconv.formats.spec import per_group
from lpconv.forms.facts import Component
from lpconv.forms.form import Fetch
from lpconv.storage.header import DTYPE_BITS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lpconv.kernels.buffers import Buffers


# The kinds whose numbers are exact in 16-bit floats.
SHORT = ("fp8", "e2m1")
_PIECE = 2**17  # bytes whose numbers are looked up at once

# Unsigned integers by their bits, in 32-bit words without gaps, the first in the lowest bits.
UNSIGNED = {bits: f"uint{bits}" for bits in range(2, 9)}
_BITS = {"e2m1": 4, "int4": 4, "awq": 4, **{kind: bits for bits, kind in UNSIGNED.items()}}
# Codes that tiles pack, by format: their kind, what is added to them, and the dtype of the file.
PACKED = {"e2m1": ("e2m1", 0, "U8"), **{f"int{b}": (kind, -(2 ** (b - 1)), "I32") for b, kind in UNSIGNED.items()}}
# The nibble of number k of a word: AWQ's kernels need the even ones in the lower half.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
_DTYPES = {
    "fp8": {"F8_E4M3", "F8_E5M2"}, "wide": {"F16", "BF16", "F32", "I8"}, "e8m0": {"U8", "F8_E8M0"}, "e2m1": {"U8"},
    "int4": {"U8"}, "awq": {"I32"}, **{kind: {"I32"} for kind in UNSIGNED.values()},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlaneNames:
    """How a layout names the stored parts of a weight, and the dtypes that it chooses.

    Names are suffixes to the weight's name, or with `of_module` to that of its module; "" for parts that it lacks:
    `packed` codes, a `scale` per tile, a `factor` that divides the scales, the `size` of integers and the `bias`, the
    value of their code 0. `axis` are leading axes of the codes, `word` the dtype in which all codes are stored,
    `integer_scale` the dtype of the scales of integers, and `scale_dtypes` those that scales in a checkpoint may have.
    """

    axis: tuple[int, ...] = ()
    packed: str = ""
    word: str = ""
    scale: str = "_scale"
    integer_scale: str = "F32"
    scale_dtypes: tuple[str, ...] = ("F32", "F16", "BF16")
    factor: str = ""
    size: str = ""
    bias: str = ""
    of_module: bool = False

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all parts."""
        return tuple(filter(None, (self.packed, self.scale, self.factor, self.size, self.bias)))

    def part(self, weight: str, suffix: str) -> str:
        """The name of a part of a weight."""
        return (weight.removesuffix(".weight") if self.of_module else weight) + suffix


def one_by_one(component: Component, block: tuple[int, int] = (1, 1)) -> Plane:
    """A plane of numbers of the component's own dtype; bytes are exponents, as in MX formats."""
    kind = next((k for k, dtypes in _DTYPES.items() if component.dtype in dtypes), "")
    return Plane(component=component, kind=kind, block=block)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows `top` to `bottom` and columns `left` to `right` of matrix `index` of a weight, in the file's order."""

    index: int
    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left


@dataclass(frozen=True, kw_only=True)
class Plane:
    """A matrix of stored numbers. `kind` is their encoding, see `stored_numbers`. Words run along `axis`.

    Each number belongs to `block` elements. `plus` is added to a number, modulo its bits if it `wraps`.
    """

    component: Component
    kind: str
    block: tuple[int, int] = (1, 1)
    axis: int = 1
    plus: int = 0
    wraps: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """H and W: elements of one matrix in the file. A vector is a column."""
        shape = self.component.shape
        return (1, 1) if not shape else (shape[0], 1) if len(shape) == 1 else (shape[-2], shape[-1])

    @property
    def group(self) -> tuple[int, int]:
        """The smallest number of codes that fills whole stored elements, and the number of these."""
        return per_group(_BITS[self.kind], DTYPE_BITS[self.component.dtype]) if self.kind in _BITS else (1, 1)

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and largest possible value of a code."""
        if self.kind == "int4":
            return -8.0, 7.0
        if self.kind in _BITS and self.kind != "e2m1":
            return self.plus, self.plus + 2 ** _BITS[self.kind] - 1
        largest = {"e2m1": 6.0, "F8_E4M3": 448.0, "F8_E5M2": 57344.0, "I8": 127.0}
        high = largest.get(self.kind, largest.get(self.component.dtype, float("inf")))
        return -high, high

    def holds(self, shape: tuple[int, int]) -> bool:
        """Whether this has the numbers for a matrix, in the right dtype, padded to less than a word."""
        rows, cols = (-(-n // b) for n, b in zip(shape, self.block, strict=True))
        codes, elements = self.group
        words = (-(-rows * elements // codes), cols) if self.axis == 0 else (rows, -(-cols * elements // codes))
        return self.size == words and self.component.dtype in _DTYPES.get(self.kind, ())

    def fetch(self, fetch: Fetch, span: Span) -> Tensor:
        """The stored elements of the blocks in a span, [h, w]."""
        import torch

        (height, width), (rows, cols) = self.size, self._words(span)
        first = span.index * height
        if cols == (0, width) or rows[1] - rows[0] == 1:
            start = (first + rows[0]) * width + cols[0]
            count = (rows[1] - rows[0] - 1) * width + cols[1] - cols[0]
            return fetch(self.component, start, start + count).view(rows[1] - rows[0], cols[1] - cols[0])
        starts = ((first + row) * width for row in range(*rows))
        return torch.stack([fetch(self.component, s + cols[0], s + cols[1]) for s in starts])

    def numbers(self, raw: Tensor, span: Span) -> Tensor:
        """The numbers in fp32, one for each block in a span."""
        x = stored_numbers(raw, self.kind, self.axis)
        if self.plus:
            x = x + self.plus
            if self.wraps:
                x = x.remainder_(2 ** _BITS[self.kind])
        (top, bottom), (left, right) = self._blocks(span)
        (first_row, _), (first_col, _) = self._words(span)
        codes, elements = self.group
        above, before = (
            (first_row // elements * codes, first_col) if self.axis == 0 else (first_row, first_col // elements * codes)
        )
        return x[top - above : bottom - above, left - before : right - before]

    def spread(self, x: Tensor, span: Span) -> Tensor:
        """Expand numbers of blocks to each element of a span, or so that they broadcast to it."""
        _, (left, _) = self._blocks(span)
        cols, width = self.block[1], span.shape[1]
        x = self.expand_rows(x, span)
        if cols > 1 and x.shape[1] > 1:
            skipped = span.left - left * cols
            x = x.unsqueeze(2).expand(-1, -1, cols).flatten(1)[:, skipped : skipped + width]
        return x

    def expand_rows(self, x: Tensor, span: Span) -> Tensor:
        """Expand numbers of blocks to each row of a span; a single row stays one."""
        (top, _), _ = self._blocks(span)
        rows, height = self.block[0], span.shape[0]
        if rows == 1 or x.shape[0] == 1:
            return x
        skipped = span.top - top * rows
        return x.unsqueeze(1).expand(-1, rows, -1).flatten(0, 1)[skipped : skipped + height]

    def _blocks(self, span: Span) -> tuple[tuple[int, int], tuple[int, int]]:
        """The range of blocks in a span, by rows and by columns."""
        rows, cols = self.block
        return (span.top // rows, -(-span.bottom // rows)), (span.left // cols, -(-span.right // cols))

    def _words(self, span: Span) -> tuple[tuple[int, int], tuple[int, int]]:
        """The range of stored elements that contain these blocks."""
        (top, bottom), (left, right) = self._blocks(span)
        (codes, elements), (height, width) = self.group, self.size
        if self.axis == 0:
            return (top // codes * elements, min(-(-bottom // codes) * elements, height)), (left, right)
        return (top, bottom), (left // codes * elements, min(-(-right // codes) * elements, width))


def stored_numbers(raw: Tensor, kind: str, axis: int) -> Tensor:
    """Stored elements [h, w] as fp32 numbers.

    ``fp8`` and ``wide`` are numbers of their dtype, ``e8m0`` bytes 2^(byte - 127) with 255 as NaN (OCP MX 1.0, 5.4.1),
    ``e2m1`` two per byte, the first in the lower half, ``int4`` the same in two's complement; the others are unsigned
    integers without gaps. The numbers of the last word may be fewer than those returned.
    """
    import torch

    from lpconv.formats.codes import unpack

    if kind in SHORT:
        return fill(
            torch.empty(raw.shape[0], raw.shape[1] * per_group(_BITS.get(kind, 8))[0], device=raw.device), raw, kind
        )
    if kind == "e8m0":
        return raw.view(torch.float8_e8m0fnu).float()
    if kind == "wide":
        return raw.float()
    if axis == 0:
        return stored_numbers(raw.t(), kind, 1).t()
    if kind == "awq":
        return stored_numbers(raw, "uint4", 1).view(len(raw), -1, 8)[:, :, _AWQ_NIBBLES].flatten(1)
    packed = raw.contiguous().view(-1).view(torch.uint8).view(raw.shape[0], raw.shape[1] * raw.itemsize)
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % per_group(_BITS[kind])[1]))
    numbers = unpack(packed.view(-1), _BITS[kind]).view(len(raw), -1)
    return ((numbers ^ 8).float() - 8) if kind == "int4" else numbers.float()


def fill(out: Tensor, raw: Tensor, kind: str) -> Tensor:
    """Write the numbers of stored elements [h, w] of a kind in `SHORT` to `out` [h, numbers]; exact in 16 bits."""
    import torch

    from lpconv.kernels.decode import decode

    if kind == "fp8":
        return decode(raw.contiguous(), out.dtype, out=out)
    # Both numbers of a byte in one lookup of twice their bits: 50 times faster than a lookup for each half.
    both, (index,) = _pairs(out.dtype, raw.device), _indices().on(raw.device)
    targets = out.view(-1).view(both.dtype)
    for codes, pairs in zip(torch.split(raw.reshape(-1), _PIECE), torch.split(targets, _PIECE), strict=True):
        torch.index_select(both, 0, index[: len(codes)].copy_(codes), out=pairs)
    return out


@functools.cache
def _indices() -> Buffers:
    import torch

    from lpconv.kernels.buffers import Buffers

    return Buffers(lambda device: (torch.empty(_PIECE, dtype=torch.int32, device=device),))


@functools.lru_cache(maxsize=8)
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two e2m1 numbers of every byte, as one integer."""
    import torch

    from lpconv.formats.codes import code_values

    one = code_values("e2m1").to(dtype=dtype, device=device)
    both = torch.stack((one.repeat(16), one.repeat_interleave(16)), dim=1)
    return both.view(torch.int64 if dtype.itemsize == 4 else torch.int32).view(-1)
