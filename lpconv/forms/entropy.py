"""Entropy-coded unit scaling: integers without a bound, one step per tensor, value = step · code.

Blocks of scales spend bits on large numbers everywhere; a code of variable length spends them only on the large numbers
themselves, so equal bytes keep more of the weights. The step alone decides the size: the smaller it is, the more bits
per integer. A plan fixes the bytes of a tensor from its header, as a budget of bits per number, and the conversion uses
the smallest step whose coded size fits; zeros fill the rest. The size at every step follows from one histogram of the
tensor's numbers, rounded to 16 bits, by its entropy (Shannon 1948), corrected by one coding or two.

Blocks of about 2^16 integers, in whole rows, are coded on their own in Pco's format (github.com/pcodec/pcodec,
docs/format.md), whose blocks contain their own table. At 2 to 8 bits that takes 0.3 to 0.6 % more than the entropy, and
is ten times as fast to decode as range coders with less overhead (docs/methods/entropy.md).

`NAME_blocks` has the bytes of every block, and `NAME_shape` has no numbers, only a shape: 0 and then the tensor's.
Steps have 9 significant bits, so that step · code is exact in fp32.

With error feedback, `NAME_columns` (e4m3fn) has a factor of the step for every column. The codes of a block then are in
the order of columns of rising factors, whose quarters are coded apart, because columns of larger steps need fewer bits.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from lpconv.errors import InputError
from lpconv.formats.spec import CODED, FORMATS, Format
from lpconv.forms.coded import CodedForm
from lpconv.forms.facts import BlockFacts, Component, EncodedBlock, FormSettings, Headers, Measurement, block_ranges
from lpconv.forms.form import Form, Over, Side, not_finite_error
from lpconv.forms.scaled import SCALE_SUFFIX, ScaledCodes
from lpconv.mcf.point_layout import MAX_COLS
from lpconv.storage.packed import coded_numbers, decode_numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from lpconv.forms.blocks import Workspace

    # The different numbers of some blocks, rounded to 16 bits, how often each occurs, and how often in blocks that
    # this changed.
    Histogram = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]

_BLOCKS_SUFFIX, _SHAPE_SUFFIX, _COLUMNS_SUFFIX = "_blocks", "_shape", "_columns"
_BLOCK = 2**16  # integers that are coded together
_LEAST_BYTES = 2**8  # of a coded block: with fewer, its table would take a large part
_LEVEL = 12  # the most: at 4 bits, 0.2 % less than the default, in nearly the same time
_STEPS = 256  # steps between two powers of two: 9 bits, and codes have 15
_LARGEST = 2**15 - 1  # code
_LEAST_STEP, _LARGEST_NUMBER = -126 * _STEPS, 2.0**124  # in fp32, which also has a step of 8 times this number
_TRIES = 3
_PARTS = 4  # of a block with factors of columns, each coded for its own frequencies
_LEAST_PART = 2**14  # integers: on smaller matrices, four tables cost what factors save
_LEAST_ROWS = 2**7  # of a matrix with factors, which take 8 bits per column
_LEAST_FACTOR, _LARGEST_FACTOR = 2.0**-6, 2.0**8  # normal numbers of e4m3fn


@dataclass(frozen=True, kw_only=True)
class EntropyCoded(CodedForm):
    """Integers with one step, of which the coded blocks take at most `payload` bytes.

    With `has_columns`, the step has a factor for every column of every matrix.
    """

    kind: ClassVar[str] = "entropy"
    suffixes: ClassVar[tuple[str, ...]] = (SCALE_SUFFIX, _BLOCKS_SUFFIX, _SHAPE_SUFFIX, _COLUMNS_SUFFIX)
    encoded_per_second: ClassVar[float] = 2e7

    has_pow2_scale: bool = False
    payload: int
    has_columns: bool = False

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Self:
        form = cls(name=name, shape=shape, format=format, payload=0)
        if settings.has_feedback and len(shape) > 1:
            divided = replace(form, has_columns=True)
            is_worth_it = divided._height >= _LEAST_ROWS and divided.cols >= _PARTS * _LEAST_PART
            form = divided if is_worth_it else form
        budget = math.floor(settings.budget_bits * form.num_elements / 8)
        return replace(form, payload=budget - sum(c.num_bytes for c in form.side))

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        if shape and shape[-1] > MAX_COLS:
            return f"rows of {shape[-1]} elements are too long for blocks of whole rows"
        form = cls.of("", shape, format, settings)
        if form.payload < _LEAST_BYTES * form._num_blocks:
            return f"{form.num_elements} elements are too few to be entropy-coded at {settings.budget_bits:g} bits"
        return None

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        codes, shape = headers.root[name], headers.root.get(name + _SHAPE_SUFFIX)
        if headers.quantised_by != cls.quantised_by or shape is None or len(codes.shape) != 2:
            return None
        dims = shape.shape[1:]
        has_columns = name + _COLUMNS_SUFFIX in headers.root and len(dims) > 1 and 0 not in dims
        form = cls(name=name, shape=dims, format=CODED, payload=codes.shape[1], has_columns=has_columns)
        return form if all(map(headers.holds, form.components)) else None

    @property
    def words(self) -> str:
        return "entropy-coded integers with one step" + " and a factor of each column" * self.has_columns

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        return (
            Component(name=self.name + SCALE_SUFFIX, dtype="F32", shape=(1,)),
            Component(name=self.name + _BLOCKS_SUFFIX, dtype="I32", shape=(self._num_blocks,)),
            Component(name=self.name + _SHAPE_SUFFIX, dtype="U8", shape=(0, *self.shape)),
            *self.factors,
            Component(name=self.name, dtype="U8", shape=(1, self.payload)),
        )

    @property
    def factors(self) -> tuple[Component, ...]:
        """The component with the factors of columns, if there are any."""
        shape = (*self.shape[:-2], self._width)
        return (Component(name=self.name + _COLUMNS_SUFFIX, dtype="F8_E4M3", shape=shape),) * self.has_columns

    @property
    def bits(self) -> int:
        return 8 * self.num_bytes // self.num_elements

    @property
    def _width(self) -> int:
        """Elements of a row."""
        return max(self.shape[-1], 1) if self.shape else 1

    @property
    def _height(self) -> int:
        """Rows of a matrix."""
        return self.shape[-2]

    @functools.cached_property
    def cols(self) -> int:
        """Elements of a block, whole rows: about 2^16, or four times as many of one matrix, in nearly equal blocks."""
        if not self.has_columns:
            return max(_BLOCK // self._width, 1) * self._width
        count = min(-(-self._height * self._width // (_PARTS * _BLOCK)), self._height)  # blocks of a matrix
        rows = -(-self._height // count)
        while len(self.shape) > 2 and self._height % rows:
            rows -= 1
        return rows * self._width

    @property
    def _num_blocks(self) -> int:
        return -(-self.num_elements // self.cols)

    @property
    def packed(self) -> str:
        return self.format.name

    @property
    def plain(self) -> Form:
        """fp32 numbers for the integers."""
        return _Uncoded(name=self.name, shape=self.shape, format=FORMATS["fp32"], has_pow2_scale=False, coded=self)

    def from_plain(self, parts: Side) -> Side:
        import torch

        codes = parts[self.name].view(-1).round().to(torch.int16).numpy()  # a number / its step may be just below
        coded = list(self._coded(codes, 0, parts))
        data, step = b"".join(coded), self.scale(parts)
        kept = {c.name: parts[c.name] for c in self.factors}
        if len(data) > self.payload:  # a step 2^b times as large saves b bits of each number
            surplus = 8 * (len(data) - self.payload) / self.num_elements
            return {**self._side(_step(_index(step * 2**surplus) + 1), []), **kept}
        payload = torch.frombuffer(bytearray(data.ljust(self.payload, b"\0")), dtype=torch.uint8).view(1, -1)
        return {**self._side(step, list(map(len, coded))), **kept, self.name: payload}

    def _side(self, step: float, sizes: Sequence[int]) -> Side:
        """The side tensors, with equal columns."""
        import torch

        return {
            self.name + SCALE_SUFFIX: torch.tensor([step], dtype=torch.float32),
            self.name + _BLOCKS_SUFFIX: torch.tensor(sizes, dtype=torch.int32),
            self.name + _SHAPE_SUFFIX: torch.empty((0, *self.shape), dtype=torch.uint8),
            **{c.name: torch.ones(c.shape).to(torch.float8_e4m3fn) for c in self.factors},
        }

    def with_column_errors(self, measured: Measurement, index: int, errors: Tensor) -> Measurement:
        """Steps inverse to the errors: at equal bits, the product of a column's step and its error is then the same."""
        import torch

        if not self.has_columns:
            return measured
        logs = errors.clamp_min(torch.finfo(torch.float32).tiny).log2()
        logs = logs.mean() - logs
        largest_code = measured.stats.absmax / self.scale(measured.side)  # with a factor of 1
        least = min(max(largest_code / _LARGEST * 2, _LEAST_FACTOR), 1.0)  # feedback may double a number
        bounds = math.log2(least), math.log2(_LARGEST_FACTOR)
        shifts = range(-(2**12), 2**12)  # which keep the mean at 0 within the bounds
        shift = bisect_left(shifts, -1e-3, key=lambda each: float((logs + each / 64).clamp_(*bounds).mean()))
        factors = (logs + shifts[shift] / 64).clamp_(*bounds).exp2_().to(torch.float8_e4m3fn)
        columns = measured.side[self.name + _COLUMNS_SUFFIX].clone()
        columns.view(torch.uint8).view(-1, self._width)[index] = factors.view(torch.uint8)
        return replace(measured, side={**measured.side, self.name + _COLUMNS_SUFFIX: columns})

    def scale(self, side: Side) -> float:
        return float(side[self.name + SCALE_SUFFIX])

    def code_scale(self, side: Side, start: int, stop: int) -> float | Tensor:
        import torch

        if not self.has_columns:
            return self.scale(side)
        steps = side[self.name + _COLUMNS_SUFFIX].float().view(-1, self._width) * self.scale(side)
        first, last = start // self._width, stop // self._width
        return steps.expand(last - first, -1) if len(steps) == 1 else steps[torch.arange(first, last) // self._height]

    def is_valid_side(self, side: Side) -> bool:
        sizes = side[self.name + _BLOCKS_SUFFIX]
        is_positive = not self.has_columns or bool((side[self.name + _COLUMNS_SUFFIX].float() > 0).all())  # not NaN
        fits = bool((sizes > 0).all()) and int(sizes.sum()) <= self.payload
        return is_positive and fits and 0 < self.scale(side) < math.inf

    def look(self, x: Tensor, start: int, work: Workspace) -> BlockFacts:
        """A histogram of the block's numbers, rounded to 16 bits. Raises InputError for NaN, Inf and beyond 2^124."""
        from lpconv.forms.blocks import block_stats

        if self.chosen is not None:
            return super().look(x, start, work)
        stats = block_stats(x, work)
        if not stats.is_finite or stats.absmax > _LARGEST_NUMBER:
            raise not_finite_error(self.name, self.format)
        return BlockFacts(stats=stats, more=_histogram(x))

    def _combine(self, looked: BlockFacts, over: Over, fused: Sequence[Over]) -> Measurement:
        """The smallest step whose coded size fits, and the size of each block with it."""
        from lpconv.forms.blocks import as_float32

        stats, histogram = looked.stats, _joined(looked.more)

        def coded_sizes(step: float) -> list[int]:
            side = self._side(step, [])

            def sizes(x: Tensor, start: int, work: Workspace) -> list[int]:
                codes = _codes(as_float32(x, work), step)
                return [len(coded) for coded in self._coded(codes, start, side)]

            return [size for block in over(sizes) for size in block]

        step, sizes = _smallest_step(histogram, stats.absmax, self.payload, coded_sizes)
        return Measurement(stats=stats, side=self._side(step, sizes))

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        import torch

        from lpconv.forms.blocks import as_float32, block_error
        from lpconv.forms.codes import decode

        if self.chosen is not None:
            return super().encode(x, start, measured, work)
        value, stop = as_float32(x, work), start + x.numel()
        step = self.code_scale(measured.side, start, stop)
        codes = _codes(value, step)
        first, last = self.place(start, stop, measured.side)
        coded = b"".join(self._coded(codes, start, measured.side)).ljust(last - first, b"\0")
        got = decode(torch.from_numpy(codes), step, out=work.scratch.error[: x.numel()])
        data = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
        return EncodedBlock(data=(data,), error=block_error(value, got))

    def _coded(self, codes: NDArray[np.int16], start: int, side: Side) -> Iterator[bytes]:
        """The coded blocks of some whole rows, from element `start` on."""
        for first, last in block_ranges(len(codes), self.cols, block_size=self.cols):
            block, order = codes[first:last], self._order(start + first, side)
            if order is None:
                yield coded_numbers(block, level=_LEVEL)
            else:
                by_column = block.reshape(-1, self._width).T[order]
                yield coded_numbers(by_column.ravel(), level=_LEVEL, parts=_PARTS)

    def _order(self, start: int, side: Side) -> NDArray[np.int64] | None:
        """The columns of the matrix of element `start` by rising factors, in which they are coded."""
        import torch

        if not self.has_columns:
            return None
        factors = side[self.name + _COLUMNS_SUFFIX].view(torch.uint8).view(-1, self._width)  # rise like their bytes
        return factors[start // (self._height * self._width)].numpy().argsort(kind="stable")

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        sizes = side[self.name + _BLOCKS_SUFFIX]
        first, last = (int(sizes[: -(-at // self.cols)].sum()) for at in (start, stop))
        return first, self.payload if stop == self.num_elements else last

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        """The numbers of whole blocks. Raises InputError if they are damaged."""
        import torch

        from lpconv.forms.codes import decode

        sizes = side[self.name + _BLOCKS_SUFFIX][start // self.cols : -(-stop // self.cols)].tolist()
        codes, coded, at = torch.empty(stop - start, dtype=torch.int16), data[0].numpy(), 0
        for index, (size, block) in enumerate(zip(sizes, torch.split(codes, self.cols), strict=True)):
            if not decode_numbers(coded[at : at + size].tobytes(), block.numpy()):
                raise InputError(f"the codes of `{self.name}` are damaged", hint="download the checkpoint again")
            at += size
            order = self._order(start + index * self.cols, side)
            if order is not None:
                by_column = block.numpy().reshape(self._width, -1)[order.argsort()]
                block.numpy().reshape(by_column.T.shape)[:] = by_column.T
        return decode(codes, self.code_scale(side, start, stop))

    decode_to = Form.decode_to  # that of `CodedForm` is for codes with places of their own


@dataclass(frozen=True, kw_only=True)
class _Uncoded(ScaledCodes):
    """fp32 numbers for the integers of `coded`, with the same steps."""

    coded: EntropyCoded

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        return (*self.coded.factors, *super().components)

    @property
    def cols(self) -> int:
        return self.coded.shape[-1] if self.coded.has_columns else 1

    def code_scale(self, side: Side, start: int, stop: int) -> float | Tensor:
        return self.coded.code_scale(side, start, stop)


def _histogram(x: Tensor) -> Histogram:
    import numpy as np
    import torch

    short = x if x.itemsize == 2 else x.bfloat16()
    is_exact = x.itemsize == 2 or torch.equal(short.to(x.dtype), x)
    counts = np.bincount(short.view(torch.int16).numpy().view(np.uint16), minlength=2**16)
    patterns = counts.nonzero()[0]
    numbers = torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(short.dtype)
    counts = counts[patterns]
    return numbers.float().numpy(), counts, counts * (not is_exact)


def _joined(histograms: Sequence[Histogram]) -> Histogram:
    import numpy as np

    numbers, *counts = map(np.concatenate, zip(*histograms, strict=True))
    numbers, which = np.unique(numbers, return_inverse=True)
    of_all, rounded = (np.bincount(which, weights=c).astype(np.int64) for c in counts)
    return numbers, of_all, rounded


def _codes(value: Tensor, step: float | Tensor) -> NDArray[np.int16]:
    """The nearest integer multiples of a step, or one for each column, which keep within 16 bits."""
    import numpy as np

    from lpconv.forms.codes import rows_of

    codes = (rows_of(value, step) / step).numpy().reshape(-1)
    return np.clip(np.rint(codes, out=codes), -_LARGEST, _LARGEST, out=codes).astype(np.int16)


def _step(index: int) -> float:
    """Step number `index`: 256 to 511 times a power of two, in rising order."""
    return math.ldexp(_STEPS + index % _STEPS, index // _STEPS - 8)


def _index(step: float) -> int:
    """The index of the smallest step that is at least `step`."""
    mantissa, exponent = math.frexp(step)  # at least a half
    return max(math.ceil(mantissa * 2 * _STEPS) - _STEPS + (exponent - 1) * _STEPS, _LEAST_STEP)


def _smallest_step(
    histogram: Histogram, absmax: float, payload: int, coded_sizes: Callable[[float], list[int]]
) -> tuple[float, list[int]]:
    """The smallest step whose coded size fits, and the sizes of its blocks.

    The entropy of the histogram predicts a size up to the coder's overhead, which each coding measures.
    """
    if not absmax:
        return 1.0, coded_sizes(1.0)
    least, most = _index(absmax / _LARGEST), _index(4 * absmax)  # which makes all numbers 0
    overhead, best = 1.0, (most + 1, [0])

    def falling(index: int) -> float:
        return -_entropy_bytes(histogram, _step(index))

    for _ in range(_TRIES):
        index = least + bisect_left(range(least, most), -payload / overhead, key=falling)
        if index >= best[0]:
            break
        sizes = coded_sizes(_step(index))
        overhead = sum(sizes) / max(-falling(index), 1.0)
        best = (index, sizes) if sum(sizes) <= payload else best
    while best[0] > most:  # the last one nearly fits
        index += 1
        sizes = coded_sizes(_step(index))
        best = (index, sizes) if sum(sizes) <= payload or index == most else best
    return _step(best[0]), best[1]


def _entropy_bytes(histogram: Histogram, step: float) -> float:
    """The entropy of the codes of all numbers, in bytes; rounded numbers are spread evenly over the codes nearby."""
    import numpy as np

    numbers, counts, rounded = histogram
    spread = (rounded * np.log2(np.maximum(np.spacing(np.abs(numbers)) * 2**16 / step, 1))).sum()  # bf16's spacing
    codes = np.rint(numbers / np.float32(step))
    share = np.bincount((codes - codes.min()).astype(np.int64), weights=counts)
    share = share[share > 0] / share.sum()
    return float(counts.sum() * -(share * np.log2(share)).sum() + spread) / 8
