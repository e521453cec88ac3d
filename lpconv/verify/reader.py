"""Read a converted checkpoint back: records from `lpconv.json`, values decoded block by block."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from lpconv.errors import InputError, UnsupportedError
from lpconv.forms import Form
from lpconv.forms.coded import digest_of
from lpconv.forms.scaled import SCALE_SUFFIX
from lpconv.gguf import GGUF
from lpconv.layouts.reader import FETCH_AGAIN, StoredTensors, open_readable
from lpconv.plan.options import NEAREST
from lpconv.results import CalibrationRecord, SourceRecord, TensorRecord, from_json
from lpconv.storage.checkpoint import Checkpoint, Openable, Residuals, read_residual
from lpconv.storage.contents import read_json
from lpconv.storage.header import DTYPE_BITS
from lpconv.storage.remote import is_url
from lpconv.storage.source import read_tensor
from lpconv.storage.staging import MARKER, TUNED, check_is_output

_FORMAT_VERSION = 1
# Times a format's largest number: the farthest that a code can be from a number within its scale. For integers, two are
# added to that number: they have one more below, and scales of 2 bits clip more.
_MOST_STEPS = 3
# Other outputs that have an lpconv.json.
_OTHER_KINDS = {
    "onnx": "a checkpoint exported to ONNX",
    "part": "one part of a conversion",
    "repair": "a repaired checkpoint",
    "restore": "a restored checkpoint",
}
# Fields read from lpconv.json, with their JSON types.
_PROVENANCE = {"method": str, "source": dict, "source_config": dict, "options": dict, "tensors": list}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """An output of a conversion and its document `lpconv.json`, as `provenance`."""

    directory: Path
    provenance: Mapping[str, Any]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The output, opened once. Raises the errors of `Checkpoint.open`."""
        return Checkpoint.open(self.directory)

    @cached_property
    def tensors(self) -> tuple[TensorRecord, ...]:
        """The record of every tensor. Raises InputError if it is damaged."""
        return from_json(tuple[TensorRecord, ...], self.provenance["tensors"])

    def check_source(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise InputError unless the checkpoint called `name` has the tensors that were converted, by their shapes."""
        recorded = {r.name: r.shape for r in self.tensors}
        leaves_out = self.provenance["options"].get("layout") == GGUF  # masks, which its files do not hold
        names = sorted(recorded if leaves_out else recorded.keys() | shapes.keys())
        wrong = next((n for n in names if recorded.get(n) != shapes.get(n)), None)
        if wrong is not None:
            a, b = (s.get(wrong, "no such tensor") for s in (recorded, shapes))
            raise InputError(
                f"`{self.directory.name}` was not made from `{name}`: they differ in `{wrong}`, {a} and {b}",
                hint="pass the checkpoint that was converted to --against",
            )

    @cached_property
    def absmax(self) -> Mapping[str, float]:
        """The largest inputs that calibration found, by module. Raises InputError if there are none."""
        return from_json(CalibrationRecord, self.provenance.get("calibration")).absmax

    def open_source(self, *, option: str) -> Checkpoint:
        """The recorded source. Raises InputError, whose hint names `option`, if it is not here."""
        recorded = from_json(SourceRecord, self.provenance["source"])
        if is_url(recorded.name):
            raise InputError(
                f"{MARKER} names `{recorded.name}` as the source, which is not read without your consent",
                hint=f"if you trust it, pass it to {option}",
            )
        try:
            return open_readable(recorded.name, revision=recorded.revision)
        except InputError as e:
            why = f"the source of `{self.directory}` is not here: {e.message}"
            raise InputError(why, hint=f"pass the source to {option}") from e


def read_output(directory: Path) -> Recorded:
    """An output with its record. Raises InputError if lpconv.json is missing, damaged or from a newer version."""
    check_is_output(directory)
    document = read_json(directory / MARKER)
    kind = _OTHER_KINDS.get(str(document.get("kind")))
    if kind is not None:
        raise UnsupportedError(
            f"`{directory}` is {kind}, not a converted one", hint="pass the output of `lpconv convert` it was made from"
        )
    if document.get("format_version") != _FORMAT_VERSION:
        raise InputError(f"`{directory}` has format_version {document.get('format_version')}", hint="update lpconv")
    wrong = [k for k, kind in _PROVENANCE.items() if not isinstance(document.get(k), kind)]
    if wrong:
        raise InputError(f"`{directory / MARKER}` has no {' and no '.join(wrong)}", hint="download the output again")
    return Recorded(directory=directory, provenance=document)


class OutputReader(StoredTensors):
    """The tensors of a converted checkpoint under their source names.

    `records` describe how each was converted; `of` takes those of an output, and checks that the residual belongs to
    the weights. Raises InputError if the files do not match the records.
    """

    rounding, is_trained = NEAREST, False

    def __init__(self, directory: Openable, records: Sequence[TensorRecord], residuals: Residuals | None) -> None:
        super().__init__(Checkpoint.open(directory), residuals)
        self.records = {r.name: r for r in records if r.action != "tie"}
        wrong = next((r for r in self.records.values() if not self._fits(r)), None)
        if wrong is None:
            return
        self.close()
        if wrong.scale is not None and wrong.name + SCALE_SUFFIX not in self.entries:
            raise InputError(f"there is no scale for the codes of `{wrong.name}`", hint=FETCH_AGAIN)
        raise InputError(f"tensor `{wrong.name}` is not stored as {MARKER} describes", hint=FETCH_AGAIN)

    @classmethod
    def of(cls, recorded: Recorded) -> Self:
        reader = cls(recorded.checkpoint, recorded.tensors, read_residual(recorded.directory))
        reader.rounding = recorded.provenance["options"].get("rounding", NEAREST)
        reader.is_trained = (recorded.directory / TUNED).is_file()
        return reader

    def _fits(self, record: TensorRecord) -> bool:
        form = self.forms.get(record.name)
        if form is None or form.shape != record.shape or record.action not in ("keep", "convert"):
            return False
        if form.format is None:
            return record.action == "keep" and form.data[0].dtype == record.source_dtype
        named = (form.format.name, form.num_points, form.scale(self.side(record.name)))
        wanted = (record.format, record.points, record.scale)
        return record.action == "convert" and named == wanted and record.source_dtype in DTYPE_BITS

    def as_chosen(self, form: Form) -> Form:
        """The form with the stored codes, for a tensor whose codes error feedback chose. Other forms are unchanged.

        A record of chosen codes counts only if options or a training explain it, with distances that codes can have.
        """
        record = self.records[form.name].rounding if form.name in self.records else None
        if record is None or form.format is None or not form.takes_codes or not self.holds(form):
            return form
        is_explained = self.is_trained or (self.rounding != NEAREST and record.output_error is not None)
        is_near = record.max_steps <= _MOST_STEPS * (form.format.max + 2 * form.format.twos_complement)
        return form.with_codes(self._fetch, self.read_side(form), record) if is_explained and is_near else form

    def changed(self, forms: Iterable[Form]) -> Iterator[str]:
        """Names of tensors with codes from error feedback whose hash differs from the recorded one."""
        for form in forms:
            if form.rounding is not None:
                stored = {c.name: read_tensor(self._root, c.name) for c in form.components}
                if digest_of(stored) != form.rounding.sha256:
                    yield form.name
