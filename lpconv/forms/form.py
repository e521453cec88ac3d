"""What a form is: how one tensor is stored, value = Σ_i scale_i · component_i.

Everything that a conversion, a reader, a check or an export wants to know of a stored tensor is asked here, and nowhere
else does a line test which form it has before it. A `Form` is one tensor's: its name, its shape, its number format, and
what the form adds (the kind of residual, the number of points). It is made in one of two ways: `of`, when a
conversion is planned, or `recognise`, from the headers of a checkpoint.

*Data and sides.* A form stores data, as many elements as there are numbers or nearly so, which is written and read
block by block: in the root checkpoint, and for pairs also in the residual files. Beside it may lie side tensors,
small enough to be held whole: scales, and counts of points. They stand before the data in the file. So a form that has
them needs a first pass over the tensor (`measure`), after which they are known and every block can be encoded alone:
it looks at each block (`look`) and concludes from what it saw. Where the side tensors can be guessed before, looking
and encoding are one pass, and the conclusion tells whether the guess was right. So they are where each block says its
own part of the side tensors, as those of rows do: these stand behind the data (`late`).

*Blocks.* A block is a range of elements in the tensor's own order, whole rows of `cols` of them. `place` says which
elements of the stored data a range of numbers is: the same ones, unless rows are stored at several times their length.

*Value semantics.* Tensors in, tensors out: no path, no file, no device, nothing remembered. Work runs in a
`Workspace`, which a thread keeps, so that nothing is allocated for each block. `reader.py` is the one file of this
package that reads.

*Two answers.* `encode` is fast; `is_right` is the slow, obvious reference that a check compares with: it rounds by
`formats.cast` or demands the bound that the form promises, and shares nothing with the encoder.

*No torch before tensors.* Names, dtypes and sizes of everything that will be stored are known from headers. A plan can
be made and refused without waiting seconds for torch; hence the imports inside the methods that handle tensors, in all
files of the forms.

A new form is one file with a subclass and one line in `FORMS`; `tests/forms/test_contract.py` then tries it. A form
that transformers shall open as it lies must also be learnt by the loader module, `models/plugin.py`.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from lpconv.formats.grains import TENSOR, Grain
from lpconv.formats.spec import Format
from lpconv.forms.facts import Component, Converted, Encoded, Headers, Looked, Measured, Settings
from lpconv.forms.ranges import block_ranges
from lpconv.forms.stored import Side, Stored
from lpconv.results import RoundingRecord

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace


T = TypeVar("T")


class Over(Protocol):
    """Runs a function on every block of one tensor, with the element where it starts; gives its results in order.

    Each call reads the tensor anew, as far as the results are asked for.
    """

    def __call__(self, job: Callable[[Tensor, int, Workspace], T], /) -> Iterable[T]: ...


@dataclass(frozen=True, kw_only=True)
class Form(Stored):
    """How the tensor `name` of `shape` is stored. `format` is that of its numbers, None where it keeps its own bits.

    `kind` is the key in `FORMS`, `suffixes` what follows the names of side tensors. `quantised_by` is the
    `quant_method` of the config of such checkpoints, None for ordinary ones. `holds_anything` says that a tensor of any
    shape loses too little by the form to be left out; `holds_one_format`, that all converted tensors of a checkpoint
    have one format, and `of_linears`, that only weights of `Linear` modules have it. `encoded_per_second` and
    `checked_per_second` are the elements of which a conversion writes, and a check compares, so many a second on one
    core of a virtual machine of 2026, whose source was bf16.
    """

    kind: ClassVar[str]
    encoded_per_second: ClassVar[float] = 1e8
    checked_per_second: ClassVar[float] = 1e7
    suffixes: ClassVar[tuple[str, ...]] = ()
    quantised_by: ClassVar[str | None] = "lpconv"
    holds_anything: ClassVar[bool] = False
    holds_one_format: ClassVar[bool] = False
    of_linears: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: Settings) -> Form:
        """The form that a tensor gets in `format`. May be another one, where this form leaves some formats to it."""

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        """Whether there are such forms of a format that the method writes, with scales of a granularity."""
        return True

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: Settings) -> str | None:
        """Why a tensor cannot have this form, in words for a report; None where it can."""
        return None

    @classmethod
    @abstractmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        """The form of what is stored under a name, None where it is not this one."""

    @property
    def needs_first_pass(self) -> bool:
        """Whether `measure` must read the tensor before a block can be encoded."""
        return bool(self.side)

    @functools.cached_property
    def late(self) -> tuple[Component, ...]:
        """The side tensors that stand behind the data: a block says its own part of them."""
        return ()

    @property
    def num_readings(self) -> int:
        """How often a conversion reads the tensor."""
        return 2 if self.needs_first_pass and (self.shares or not self.late) else 1

    @property
    def seconds_to_encode(self) -> float:
        """Estimate for writing the tensor, on one core."""
        return self.num_elements / self.encoded_per_second

    @property
    def seconds_to_check(self) -> float:
        """Estimate for comparing the whole tensor with its source, on one core."""
        return self.num_elements / self.checked_per_second

    @property
    def has_input_scale(self) -> bool:
        """Whether a scale of the inputs that meet the weight lies beside it."""
        return False

    @property
    def rounding(self) -> RoundingRecord | None:
        """How error feedback chose the codes, None for codes that the source alone implies."""
        return None

    def with_inputs(self, absmax: float) -> Form:
        """The form of a weight that meets inputs of up to `absmax`, by which their scale is made."""
        return self

    @property
    def shares(self) -> bool:
        """Whether one of its scales is that of all weights which readers fuse."""
        return False

    def measure(self, over: Over, fused: Sequence[Over] = ()) -> Measured:
        """The first pass. `fused` read the weights that readers put into one matrix with this one, where the form has a
        scale that these share. Raises InputError where the values cannot have this form."""
        return self.conclude(list(over(self.look)), over, fused)

    def side_for(self, weight: Tensor, *, importance: Tensor | None = None, fused: Sequence[Tensor] = ()) -> Side:
        """Side tensors (scales, factors, counts) for a whole weight held in memory, the same as `measure` finds.

        `importance`, fp32 [cols], weights the squared error of each column where scales are searched; without a search
        it changes nothing. `fused` are the weights that share a scale with this one. Raises InputError as `measure`.
        """
        from lpconv.forms.blocks import Workspace

        work = Workspace()

        def over(whole: Tensor) -> Over:
            flat = whole.reshape(-1)
            ranges = list(block_ranges(flat.numel(), self.cols))
            return lambda job: (job(flat[a:b], a, work) for a, b in ranges)

        form = self if importance is None else self.with_importance(importance)
        return form.measure(over(weight), [over(each) for each in fused]).side

    def with_importance(self, importance: Tensor) -> Form:
        """The form whose scale search weights the squared error of each column by `importance`, fp32 [cols]."""
        return self

    def look(self, x: Tensor, start: int, work: Workspace) -> Looked:
        """What the first pass wants to know of a block. Raises InputError as `measure` does."""
        from lpconv.forms.blocks import block_stats

        return Looked(stats=block_stats(x, work))

    def conclude(self, looked: Sequence[Looked], over: Over, fused: Sequence[Over] = ()) -> Measured:
        """What follows from having looked at all blocks; `over` reads them again where more has to be known."""
        return Measured()

    def guess(self, sample: Callable[[], Tensor]) -> Measured | None:
        """What the first pass will most likely find by a few numbers, None where it had better be taken. `sample` reads
        them, rows from all over the tensor."""
        return None

    def begin(self, largest: float) -> Measured:
        """What precedes the first block of a form with `late` side tensors. `largest` is the largest magnitude of the
        weights that share a scale, where it `shares` one."""
        return Measured(is_guess=True)

    @abstractmethod
    def encode(self, x: Tensor, start: int, found: Measured, work: Workspace) -> Encoded:
        """One block of the source, 1-D in its own dtype, from element `start` on."""

    def look_and_encode(self, x: Tensor, start: int, found: Measured, work: Workspace) -> tuple[Looked, Encoded]:
        """Both in one go, where what was found is a guess, or what `begin` says."""
        seen = self.look(x, start, work)
        return seen, self.encode(x, start, replace(found, stats=seen.stats), work)

    @abstractmethod
    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        """Whether `got`, decoded from element `start` on, is what the source's `value` should have become.

        Both are 1-D, `value` in fp32; of what is kept both are in its own dtype.
        """

    def confirms(self, x: Tensor, data: Sequence[Tensor], start: int, side: Side, work: Workspace) -> bool:
        """Whether `is_right` says so of what stored data decode to, which `encode` would give of the source's `x`."""
        from lpconv.forms.blocks import as_float32

        got = self.decode(data, start, start + x.numel(), side)
        return self.is_right(as_float32(x, work), got, start, side)

    def rows_of_scales(self, side: Side) -> Tensor | None:
        """The scales of all numbers as rows, if each number is right or wrong by its scale and `format` alone: several
        tensors can then be compared with the reference in one call. None for other forms."""
        return None

    @classmethod
    def configured(cls, made: Converted) -> dict[str, Any]:
        """What to add to config.json, so that such a checkpoint is opened as what it is."""
        if cls.quantised_by is None:
            return {}
        # What has a scale is only said where sizes do not tell it.
        told = {k: v for k, v in made.settings.items() if k != "granularity" or v not in (TENSOR, "row")}
        written = {
            "quant_method": cls.quantised_by,
            "format_version": 1,
            **told,
            "leaves": sorted({n.rpartition(".")[2] for n in made.formats}) or ["weight"],
            "exceptions": {n: f for n, f in made.formats.items() if f != made.settings["format"]},
        }
        return {"quantization_config": written}
