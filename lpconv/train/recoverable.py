"""Checks of `finetune --recover` and `--lora` before torch is imported: the output has codes, its source is here."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.spec import CODED, FORMATS
from lpconv.layouts import LAYOUTS
from lpconv.layouts.reader import open_readable, stored_shapes
from lpconv.lookup import find
from lpconv.methods import METHODS
from lpconv.plan.options import FEEDBACK_BITS, NEAREST, ConvertOptions, FilledOptions
from lpconv.plan.settings import fill_options
from lpconv.results import from_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import ADAPTER
from lpconv.storage.staging import MARKER, is_output, is_trained, read_marker
from lpconv.train.adapter import Adapter
from lpconv.verify.reader import Recorded, read_output

_HINT = "convert it with `lpconv convert`, for example with --format int4 --granularity group:32"


@dataclass(frozen=True, kw_only=True)
class Recoverable:
    """An output of `lpconv convert` to recover: its source, and the options to convert that with new codes.

    `names` are the tensors that it stores as codes of few bits. With `adapter`, the source is the output itself, and
    the teacher that with the adapter.
    """

    output: Checkpoint
    source: Checkpoint
    options: ConvertOptions
    names: tuple[str, ...]
    adapter: Adapter | None = None

    @property
    def teacher(self) -> str:
        name = self.source.origin.name
        return name if self.adapter is None else f"{name} with {self.adapter.folder.name}"


def check_recoverable(output: Checkpoint, source: str | None) -> Recoverable:
    """Open the source of an output, by default the recorded one; or the adapter in the folder `source`.

    Raises UnsupportedError for outputs without codes that can be trained, InputError if the source is not found.
    """
    name = output.origin.name
    if not is_output(output.directory):
        raise UnsupportedError(f"`{name}` was not written by lpconv: it has no {MARKER} and no codes", hint=_HINT)
    recorded = read_output(output.directory)
    provenance = recorded.provenance
    merges = source is not None and is_adapter(source)
    if is_trained(output.directory) and not merges:
        raise UnsupportedError(f"`{name}` was trained after conversion, so it has no source to recover", hint=_HINT)
    options = from_json(FilledOptions, provenance["options"])
    find("method", options.method, METHODS, error=InputError)
    find("layout", options.layout, LAYOUTS, error=InputError)
    for record in recorded.tensors:
        if record.action == "convert":
            find("format", str(record.format), FORMATS, error=InputError)
    narrow = [r for r in recorded.tensors if r.action == "convert" and FORMATS[r.format].storage_bits <= FEEDBACK_BITS]
    has_coded = any(r.format == CODED.name for r in recorded.tensors)
    if not narrow or has_coded or not METHODS[options.method].has_granularity:
        stored = "entropy-coded integers" if has_coded else f"{options.method} in {provenance.get('format')}"
        raise UnsupportedError(
            f"`{name}` stores {stored}, but only codes of at most {FEEDBACK_BITS} bits with scales can be trained",
            hint=_HINT,
        )
    if not METHODS[options.method].form(options.layout).suffixes:  # it has no scales of their own
        raise UnsupportedError(f"`{name}` is in layout {options.layout}, whose scales cannot be trained", hint=_HINT)
    if (provenance.get("calibration") or {}).get("absmax"):
        raise UnsupportedError(
            f"`{name}` stores input scales, which training would make wrong", hint="convert without input scales"
        )
    names = tuple(r.name for r in narrow)
    adapter = Adapter.open(Path(source), stored_shapes(output), names) if source and merges else None
    found = _open_source(output, source, recorded) if adapter is None else output
    options = replace(
        options, rounding=NEAREST, calibrate=None, calibration_tokens=None, calibration_seed=None, input_scales=False,
        verify="weights", allow_missing=True, force=True,  # the output is published already
    )  # fmt: skip
    return Recoverable(output=output, source=found, options=fill_options(options), names=names, adapter=adapter)


def is_adapter(path: str) -> bool:
    """Whether a directory contains a PEFT adapter."""
    return os.path.isfile(os.path.join(path, ADAPTER))


def base_of_twin(model: Checkpoint, source: str | None) -> Checkpoint:
    """The checkpoint for the twin of adapters: the source of a conversion, or else the model itself."""
    provenance = read_marker(model.directory)
    if source is None and ("source" not in provenance or is_trained(model.directory)):
        return model
    return _open_source(model, source, Recorded(directory=model.directory, provenance=provenance))


def _open_source(output: Checkpoint, source: str | None, recorded: Recorded) -> Checkpoint:
    """The source of an output, by default the recorded one. Raises InputError if it is missing or has other tensors."""
    found = recorded.open_source(option="--source") if source is None else open_readable(source)
    ours, theirs = stored_shapes(output), stored_shapes(found)
    wrong = next((n for n in sorted(ours.keys() | theirs.keys()) if ours.get(n) != theirs.get(n)), None)
    if wrong is not None:
        raise InputError(
            f"`{found.origin.name}` is not the source of `{output.origin.name}`: they differ in tensor `{wrong}`",
            hint="pass the source that was converted to --source",
        )
    return found
