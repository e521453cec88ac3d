"""`Form`: how one tensor is stored, value = Σ_i scale_i · component_i.

All questions of a conversion, reader, check or export about a stored tensor are answered here, and no other code tests
which form it has. Readers need only its base class `Stored`, which is also that of third-party forms (`grid.py`), as
these are only read. A `Form` belongs to one tensor: its name, shape, number format, and fields of the form (the kind of
residual, the number of points). It is created by `of` when a conversion is planned, or by `recognise` from the headers
of a checkpoint.

*Data and side tensors.* A form stores data, with about as many elements as there are numbers, written and read block by
block: in the root checkpoint, and for pairs also in the residual files. There may also be side tensors, small enough to
be held in memory: scales, and counts of points. They precede the data in the file. So a form with side tensors needs a
first pass over the tensor (`measure`), after which they are known and every block can be encoded on its own: it
examines each block (`look`) and combines the results (`combine`). If the side tensors can be guessed in advance, both
happen in one pass, and `combine` reports whether the guess was right. The same holds if each block determines its own
part of the side tensors, such as scales of rows: these follow the data (`late_side`).

*Blocks.* A block is a range of elements in the tensor's own order, in whole rows of `cols` elements. `place` maps a
range of numbers to elements of the stored data: the same ones, unless rows are stored at several times their length.

*Value semantics.* Tensors in, tensors out: no path, no file, no device, no state. Work runs in a `Workspace`, which a
thread keeps, so that nothing is allocated for each block. Files are read by `layouts/reader.py`.

*Two implementations.* `encode` is fast; `is_right` is the slow, obvious reference of a check: it rounds with
`formats.cast` or checks the bound that the form promises, and shares no code with the encoder.

*No torch before tensors.* Names, dtypes and sizes of everything to be stored are known from headers. A plan can be made
and refused without the seconds of importing torch; hence the imports inside methods that handle tensors, in all files
of the forms.

`Kept`, at the end of this file, is the simplest form. A new form is one file with a subclass and one line in `FORMS`;
`tests/forms/test_contract.py` then tests it. A form that transformers should open as stored must also be added to the
loader module, `models/plugin.py`.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from lpconv.errors import InputError
from lpconv.formats.grains import TENSOR, Grain
from lpconv.formats.spec import Format
from lpconv.forms.facts import BlockFacts, Component, ConvertedFacts, EncodedBlock, FormSettings, Headers, Measurement
from lpconv.results import RoundingRecord
from lpconv.storage.header import DTYPE_BITS, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace


T = TypeVar("T")
Side = Mapping[str, "Tensor"]
Summand = tuple["Tensor", "float | Tensor"]
# Reads elements of a stored tensor from one index to another, 1-D in its own dtype.
Fetch = Callable[[Component, int, int], "Tensor"]


@dataclass(frozen=True, kw_only=True)
class Stored(ABC):
    """How the tensor `name` of `shape` is stored. `format` is its number format, None if it keeps its own bits."""

    name: str
    shape: tuple[int, ...]
    format: Format | None

    @property
    @abstractmethod
    def words(self) -> str:
        """A description for reports, such as "e4m3fn codes with one scale"."""

    @property
    @abstractmethod
    def components(self) -> tuple[Component, ...]:
        """Every stored tensor of the form."""

    @functools.cached_property
    def data(self) -> tuple[Component, ...]:
        """The components that are stored block by block, the root's first."""
        return tuple(c for c in self.components if c.name == self.name)

    @functools.cached_property
    def side(self) -> tuple[Component, ...]:
        """The components that are held in memory."""
        return tuple(c for c in self.components if c.name != self.name)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Total stored bytes."""
        return sum(c.num_bytes for c in self.components)

    @functools.cached_property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Bits of a number without scales."""
        return self.format.storage_bits if self.format else DTYPE_BITS[self.data[0].dtype]

    @property
    def agrees(self) -> bool:
        """Whether all parts have the dtypes and sizes that the weight needs."""
        return True

    @property
    def is_kept(self) -> bool:
        """Whether the tensor keeps its own bits."""
        return self.format is None

    @property
    def is_coded(self) -> bool:
        """Whether the stored numbers need packing and scales to be interpreted."""
        return not self.is_kept

    @property
    def takes_codes(self) -> bool:
        """Whether its codes can be chosen for given scales, as error feedback and training do; see `code_scale`."""
        return False

    @property
    def fine_scales(self) -> Component | None:
        """The component with scales of 16 bits or more, one per tile, which can follow a gradient; None without."""
        return None

    @property
    def cols(self) -> int:
        """Blocks are multiples of this number of elements."""
        return 1

    @property
    def num_points(self) -> int | None:
        """Number of points (rows of codes) of the tensor, None if each row has one."""
        return None

    def widened(self, start: int, stop: int) -> tuple[int, int]:
        """A range of elements, extended to whole rows if rows are stored whole."""
        return start // self.cols * self.cols, min(-(-stop // self.cols) * self.cols, self.num_elements)

    def place(self, start: int, stop: int, side: Side) -> tuple[int, int]:
        """The range of stored elements that holds the numbers `start` to `stop`."""
        return start, stop

    def read(self, fetch: Fetch, start: int, stop: int, side: Side) -> tuple[Tensor, ...]:
        """Fetch the data that `decode` needs for the numbers `start` to `stop`."""
        first, last = self.place(start, stop, side)
        return tuple(fetch(c, first, last) for c in self.data)

    @abstractmethod
    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        """Decode data from `read` to the numbers `start` to `stop` in fp32, 1-D; kept tensors keep their dtype."""

    def decode_to(self, out: Tensor, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        """`decode` into `out`, 1-D, rounded to its dtype: bitwise the same, but sometimes faster."""
        return out.copy_(self.decode(data, start, stop, side))

    def is_valid_side(self, side: Side) -> bool:
        """Whether side tensors are valid: scales are positive numbers, counts add up."""
        return True

    def code_scale(self, side: Side, start: int, stop: int) -> float | Tensor:
        """The factor of the codes of a block, viewed as rows of `cols`. Only for a form that `takes_codes`."""
        raise NotImplementedError(self.words)

    def scale_of_each(self, side: Side, start: int, stop: int) -> Tensor:
        """The scale of each number `start` to `stop`, fp32, 1-D. Only for a form that `takes_codes`."""
        import torch

        factor = self.code_scale(side, start, stop)
        ones = torch.ones(stop - start)
        if isinstance(factor, float):
            return ones.mul_(factor)
        ones.view(*factor.shape[:-1], -1).mul_(factor)
        return ones

    def with_scales(self, side: Side, scales: Tensor) -> Side:
        """The side tensors with other `fine_scales`."""
        raise NotImplementedError(self.words)

    def scale(self, side: Side) -> float | None:
        """The common factor of all codes, None if there is none or more than one."""
        return None

    def summands(self, data: Sequence[Tensor], side: Side) -> tuple[Summand, ...]:
        """The whole tensor as a sum of floating-point numbers (1-D) with factors, one each or one per row.

        Forms with other components return the decoded numbers.
        """
        return ((self.decode(data, 0, self.num_elements, side), 1.0),)


class Over(Protocol):
    """Runs a function on every block of a tensor, with its first element's index, and yields the results in order.

    Each call reads the tensor again, as far as results are consumed.
    """

    def __call__(self, job: Callable[[Tensor, int, Workspace], T], /) -> Iterable[T]: ...


@dataclass(frozen=True, kw_only=True)
class Form(Stored):
    """How a conversion stores a tensor.

    `kind` is the key in `FORMS`, `suffixes` are the name suffixes of side tensors. `quantised_by` is the `quant_method`
    in the config of such checkpoints, None for ordinary ones. `holds_anything` means that the form loses so little that
    no tensor needs to be left out; `holds_one_format`, that all converted tensors of a checkpoint have one format, and
    `of_linears`, that only weights of `Linear` modules have it, and `of_stacks`, that experts in one tensor have it,
    too, with rows and columns swapped. `encoded_per_second` and `checked_per_second` are the elements per second that a
    conversion writes and a check compares, on one core of a virtual machine of 2026 with a bf16 source.
    """

    kind: ClassVar[str]
    encoded_per_second: ClassVar[float] = 1e8
    checked_per_second: ClassVar[float] = 1e7
    suffixes: ClassVar[tuple[str, ...]] = ()
    quantised_by: ClassVar[str | None] = "lpconv"
    holds_anything: ClassVar[bool] = False
    holds_one_format: ClassVar[bool] = False
    of_linears: ClassVar[bool] = False
    of_stacks: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        """The form that a tensor gets in `format`. May be another class, if this form leaves some formats to it."""

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        """Whether this form supports a format that the method writes, with a granularity of scales."""
        return True

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        """Why a tensor cannot have this form, for a report; None if it can."""
        return None

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        """The form of the tensor stored under a name, or None if it is not this form, or if headers do not tell."""
        return None

    @property
    def block_type(self) -> str | None:
        """Name of the type of its blocks in a container with typed blocks (GGUF), None elsewhere."""
        return None

    @property
    def needs_first_pass(self) -> bool:
        """Whether `measure` must read the tensor before a block can be encoded."""
        return bool(self.side)

    @functools.cached_property
    def late_side(self) -> tuple[Component, ...]:
        """The side tensors that follow the data, because each block determines its own part of them."""
        return ()

    @property
    def num_readings(self) -> int:
        """How many times a conversion reads the tensor."""
        return 2 if self.needs_first_pass and (self.shares_scale or not self.late_side) else 1

    def seconds_at(self, per_second: float) -> float:
        """Estimated time to write or check the whole tensor at so many elements per second, on one core."""
        return self.num_elements / per_second + self._seconds_to_search

    @property
    def _seconds_to_search(self) -> float:
        """Estimated time to try several scales for each tile, on one core."""
        return 0.0

    @property
    def has_input_scale(self) -> bool:
        """Whether an input scale is stored next to the weight."""
        return False

    @property
    def cache_scale(self) -> str | None:
        """Name of the scale of keys or values that is stored next to the weight, or None."""
        return None

    def with_codes(self, fetch: Fetch, side: Side, record: RoundingRecord) -> Form:
        """The form with codes that were chosen and stored, and their side tensors. Only if it `takes_codes`."""
        raise NotImplementedError(self.words)

    @property
    def plain(self) -> Form:
        """The form to choose codes in, where each has a place of its own: this one, unless it compresses codes."""
        return self

    def from_plain(self, parts: Side) -> Side:
        """The components to store for those of `plain`; or only larger scales to choose codes with, if they need it."""
        return parts

    @property
    def nearest(self) -> Form:
        """The form with codes that follow from the source alone."""
        return self

    @property
    def rounding(self) -> RoundingRecord | None:
        """The record of error feedback that chose the codes, None for codes that follow from the source alone."""
        return None

    def with_activations(self, absmax: Mapping[str, float]) -> Form:
        """The form of a weight with the largest inputs, keys or values, which determine their scales.

        They are named after the module and `cache_scale`; others are ignored.
        """
        return self

    @property
    def shares_scale(self) -> bool:
        """Whether one of its scales is common to all weights that readers fuse."""
        return False

    def measure(self, over: Over, fused: Sequence[Over] = ()) -> Measurement:
        """The first pass over the tensor.

        `fused` read the weights that readers fuse with this one, if the form has a scale that these share. Raises
        InputError if the values cannot have this form.
        """
        return self.combine(list(over(self.look)), over, fused)

    def with_importance(self, importance: Tensor) -> Form:
        """The form whose scale search weights the squared error of each column by `importance`.

        It is fp32 [cols], or [matrices, cols] for a tensor of several matrices.
        """
        return self

    def with_column_errors(self, measured: Measurement, index: int, errors: Tensor) -> Measurement:
        """The measurement with steps for the columns of matrix number `index`, if the form has such steps.

        `errors` are proportional to the errors of the outputs for an error of 1 in each column, fp32 [cols].
        """
        return measured

    def look(self, x: Tensor, start: int, work: Workspace) -> BlockFacts:
        """The first pass over one block. Raises InputError like `measure`."""
        from lpconv.forms.blocks import block_stats

        return BlockFacts(stats=block_stats(x, work))

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        """Combine the results of `look` on all blocks; `over` reads the blocks again if more is needed."""
        return Measurement()

    def guess(self, sample: Callable[[], Tensor]) -> Measurement | None:
        """Guess the result of the first pass from a few numbers, or return None if the pass is needed.

        `sample` reads the numbers, in rows from all over the tensor.
        """
        return None

    def begin(self, largest: float) -> Measurement:
        """The measurement before the first block, for a form with `late_side` side tensors.

        `largest` is the largest magnitude of the weights that share a scale, if it has one.
        """
        return Measurement(is_guess=True)

    @abstractmethod
    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        """Encode one block of the source, 1-D in its own dtype, from element `start` on."""

    def look_and_encode(
        self, x: Tensor, start: int, measured: Measurement, work: Workspace
    ) -> tuple[BlockFacts, EncodedBlock]:
        """Both in one step, if `measured` is a guess or comes from `begin`."""
        block = self.look(x, start, work)
        return block, self.encode(x, start, replace(measured, stats=block.stats), work)

    @abstractmethod
    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        """Whether `got`, decoded from element `start` on, is the correct result for the source's `value`.

        Both are 1-D, `value` in fp32; for kept tensors both are in their own dtype.
        """

    def confirms(self, x: Tensor, data: Sequence[Tensor], start: int, side: Side, work: Workspace) -> bool:
        """Whether stored data decode to values that are right (`is_right`) for the source's `x`."""
        from lpconv.forms.blocks import as_float32

        return self.is_right(as_float32(x, work), self.decode(data, start, start + x.numel(), side), start, side)

    def rows_of_scales(self, side: Side) -> Tensor | None:
        """The scales of all numbers as rows, if scale and `format` alone decide whether a number is right, else None.

        Several such tensors can be compared with the reference in one call.
        """
        return None

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        """Entries to add to config.json, so that readers recognise such a checkpoint."""
        if cls.quantised_by is None:
            return {}
        # Granularity is written only if sizes do not imply it.
        settings = {k: v for k, v in converted.settings.items() if k != "granularity" or v not in (TENSOR, "row")}
        written = {
            "quant_method": cls.quantised_by,
            "format_version": 1,
            **settings,
            "leaves": sorted({n.rpartition(".")[2] for n in converted.formats}) or ["weight"],
            "exceptions": {n: f for n, f in converted.formats.items() if f != converted.settings["format"]},
        }
        return {"quantization_config": written}


def not_finite_error(name: str, format: Format) -> InputError:
    """Error for a tensor with NaN or Inf in a format without them."""
    return InputError(
        f"tensor `{name}` contains NaN, Inf or numbers near or beyond fp32's end, which {format.name} cannot represent",
        hint=f"leave it unconverted with --exclude '{name}'",
    )


@dataclass(frozen=True, kw_only=True)
class Kept(Form):
    """A tensor that keeps its own bits.

    `dtype` is the source's, as safetensors names it; it may be one that is not a number format of lpconv.
    """

    kind: ClassVar[str] = "kept"
    quantised_by: ClassVar[str | None] = None

    dtype: str
    format: Format | None = None

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Kept:
        return cls(name=name, shape=shape, dtype=format.safetensors or "U8")

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        return cls.unchanged(headers.root[name])

    @classmethod
    def unchanged(cls, info: TensorInfo) -> Self:
        """The form of a tensor that is stored as in its source."""
        return cls(name=info.name, shape=info.shape, dtype=info.dtype)

    @property
    def words(self) -> str:
        return f"unchanged {self.dtype}"

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        return (Component(name=self.name, dtype=self.dtype, shape=self.shape),)

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        return EncodedBlock(data=(x,))

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        return data[0]

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        import torch

        return torch.equal(got.view(torch.uint8), value.view(torch.uint8))
