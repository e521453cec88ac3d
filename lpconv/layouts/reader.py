"""Read the decoded tensors of a checkpoint in any form, whole or in blocks.

All readers use this file: checks and restoring read block by block, models and exports whole tensors. `DecodedSource`
makes any checkpoint a source of plain tensors: decoded ones are fp32, which represents the values of every form
exactly, kept ones keep their dtype. No other file of forms and layouts opens files.
"""

from __future__ import annotations  # tensors are named below and not imported

from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from lpconv.errors import InputError, UnsupportedError
from lpconv.forms import Component, Headers, Stored
from lpconv.forms.form import Side, Summand
from lpconv.forms.scaled import SCALE_SUFFIX
from lpconv.layouts import READ
from lpconv.layouts.compressed_config import input_scale_name
from lpconv.layouts.defects import Findings, from_headers
from lpconv.layouts.headers import check_readable, judged_grids, recognise
from lpconv.storage.checkpoint import RESIDUAL_FOLDER, RESIDUAL_INDEX, Checkpoint, Openable, Residuals, read_residual
from lpconv.storage.header import check_not_pointer, lay_out, quantization_method
from lpconv.storage.source import SafetensorsSource, Source, TensorEntry, open_source, read_range, read_tensor
from lpconv.storage.staging import MARKER

if TYPE_CHECKING:
    from torch import Tensor


FETCH_AGAIN = "download the checkpoint again"
_INSPECT, _SHOWN = "`lpconv inspect` lists all problems of the checkpoint", 3
_BANDS = 4  # cached bands, enough for a few threads that read side by side


def open_readable(model: Openable, *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint like `Checkpoint.open`, and check its headers before heavy imports.

    Raises InputError for a damaged header and for the problems that `inspect` finds in headers, UnsupportedError for
    layouts that lpconv does not read.
    """
    checkpoint = Checkpoint.open(model, revision=revision)
    for name in checkpoint.weight_files if checkpoint.kind == "torch" else ():
        check_not_pointer(checkpoint.directory / name)
    check_readable(Headers.of(checkpoint.config, {}))  # first, because headers of unknown layouts may be odd
    headers = Headers.of(checkpoint.config, checkpoint.tensors)
    check_readable(headers)
    if headers.quantised_by is not None or "model_type" in checkpoint.config:  # else it need not be a model
        _refuse(from_headers(headers, recognise(headers) if headers.quantised_by in READ else {}), headers)
    return checkpoint


def _refuse(found: Findings | None, headers: Headers) -> None:
    """Raise the problems of a checkpoint, with the words of `inspect`."""
    if found is not None and found.problems:
        error = UnsupportedError if headers.quantised_by is None else InputError
        raise error("; ".join(found.problems[:_SHOWN]), hint=_INSPECT, details={"problems": list(found.problems)})


class StoredTensors:
    """The tensors of a checkpoint under their own names, with the form of each in `forms`.

    `residuals` come from `read_residual`, or from `find_residual` if they have just been written. `is_ours`: lpconv
    wrote the checkpoint, or at least its layout is lpconv's. `warnings` are those of `inspect` about other scales.
    """

    warnings: tuple[str, ...] = ()

    def __init__(self, checkpoint: Checkpoint, residuals: Residuals | None) -> None:
        self.checkpoint = checkpoint
        with ExitStack() as opened:
            self._root = open_source(checkpoint)
            opened.callback(self._root.close)
            self._low: Source | None = None
            if residuals is not None:
                files = Checkpoint.of_files(RESIDUAL_FOLDER, residuals.directory, residuals.files)
                self._low = SafetensorsSource(files)
                opened.callback(self._low.close)
            low = self._low.entries if self._low is not None else {}
            self._headers = Headers.of(
                checkpoint.config,
                {n: e.info for n, e in self._root.entries.items()},
                low={n: e.info for n, e in low.items()},
                residual=residuals.form if residuals is not None else "",
            )
            check_readable(self._headers)
            self.forms = recognise(self._headers)
            self.is_ours = self._headers.quantised_by not in READ or (checkpoint.directory / MARKER).exists()
            # Third-party scales are judged in bands (`from_scales`) and read again if needed, since they may be many.
            in_bands = {} if self.is_ours else judged_grids(self.forms, self._headers.quantization)
            self._sides = {n: self.read_side(f) for n, f in self.forms.items() if f.side and n not in in_bands}
            self._side_again = lru_cache(maxsize=_BANDS)(lambda name: self._side_of(self.forms[name]))
            self._opened = opened.pop_all()

    @classmethod
    def open(cls, model: Openable) -> Self:
        """Open all tensors of a checkpoint, and check that its residual belongs to it.

        Raises InputError if it does not, if a scale or a residual fits no form of its tensor, and for the problems that
        `inspect` finds in headers and scales; UnsupportedError for layouts that lpconv does not read.
        """
        checkpoint = open_readable(model)
        stored = cls(checkpoint, read_residual(checkpoint.directory))
        try:
            if (stray := stored._stray()) is not None:
                raise InputError(f"`{stray}` is stored in an unknown form", hint=FETCH_AGAIN)
            if not stored.is_ours:
                from lpconv.layouts.scale_defects import from_scales  # imports torch (seconds)

                headers = stored._headers
                findings = from_scales(stored.forms, stored._root, headers.quantization, is_ours=False)
                _refuse(findings, headers)
                stored.warnings = findings.warnings if findings else ()
        except BaseException:
            stored.close()
            raise
        return stored

    def _stray(self) -> str | None:
        """A tensor that belongs to no form of lpconv's own layout, or None; `from_headers` finds third-party ones."""
        headers = self._headers
        lone = [n for n in headers.low if n not in self.forms or not self.forms[n].data[1:]]
        if headers.quantised_by is not None and headers.quantised_by not in READ:
            known = {c.name for form in self.forms.values() for c in form.components}
            lone += [n for n in headers.root if n not in known]
            lone += [n for n in self.forms if n.endswith(SCALE_SUFFIX) and n.removesuffix(SCALE_SUFFIX) in self.forms]
        return next(iter(lone), None)

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The entries of the root files."""
        return self._root.entries

    def file_of(self, name: str) -> str:
        """The root file with a tensor's codes."""
        return self._root.entries[self.forms[name].data[0].name].file

    def inputs_of(self, name: str) -> tuple[Mapping[str, Any], Tensor | None] | None:
        """How readers round the inputs of a weight: settings as in compressed-tensors, and the stored scale.

        None if they do not round them, or need a scale that is not there.
        """
        layout, module = READ.get(self._headers.quantised_by or ""), name.removesuffix(".weight")
        settings = None if layout is None else layout.inputs(self._headers.quantization, module)
        if settings is None or self.forms[name].format is None:
            return None
        leaf = input_scale_name(settings)
        if leaf is not None and f"{module}.{leaf}" not in self.entries:
            return None
        return settings, None if leaf is None else read_tensor(self._root, f"{module}.{leaf}")

    @property
    def with_residual(self) -> frozenset[str]:
        """Names of the tensors that have a residual."""
        return frozenset(self._headers.low)

    def side(self, name: str) -> Side:
        """The side tensors of a tensor; empty if its form has none."""
        return self._sides[name] if name in self._sides else self._side_again(name)

    def holds(self, form: Stored) -> bool:
        """Whether a tensor is stored exactly as `form`, without other components."""
        names = {c.name for c in self.forms[form.name].components}
        return names == {c.name for c in form.components} and all(map(self._headers.holds, form.components))

    def read_side(self, form: Stored) -> Side:
        """Read the side tensors of a form. Raises InputError if they are invalid."""
        side = self._side_of(form)
        if not form.is_valid_side(side):
            raise InputError(f"the scales of `{form.name}` do not fit its {form.words}", hint=FETCH_AGAIN)
        return side

    def _side_of(self, form: Stored) -> Side:
        return {c.name: read_tensor(self._root, c.name) for c in form.side}

    def read_data(self, name: str, start: int, stop: int) -> tuple[Tensor, ...]:
        """The data of elements `start` to `stop` as stored in the files."""
        return self.read(self.forms[name], start, stop, self.side(name))

    def read(self, form: Stored, start: int, stop: int, side: Side) -> tuple[Tensor, ...]:
        """The data that `form` needs to decode elements `start` to `stop`."""
        return form.read(self._fetch, start, stop, side)

    def read_components(self, name: str) -> Side:
        """All components of a tensor, whole, by their names in the files."""
        data = (c for c in self.forms[name].components if c.name not in self.side(name))
        return {**self.side(name), **{c.name: read_tensor(self._file(c.in_residual), c.name) for c in data}}

    def read_others(self) -> Side:
        """Root tensors that are not in `forms`, whole: scales of activations."""
        known = {c.name for form in self.forms.values() for c in form.components}
        return {n: read_tensor(self._root, n) for n in self.entries if n not in known}

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a stored root tensor, like `Source.read_bytes`."""
        self._root.read_bytes(name, start, out)

    def _fetch(self, component: Component, start: int, stop: int) -> Tensor:
        return read_range(self._file(component.in_residual), component.name, start, stop)

    def _file(self, in_residual: bool) -> Source:
        if not in_residual:
            return self._root
        assert self._low is not None
        return self._low

    def values(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor, 1-D: decoded to fp32, or unchanged if it is kept."""
        first, last = self.forms[name].widened(start, stop)
        decoded = self.forms[name].decode(self.read_data(name, first, last), first, last, self.side(name))
        return decoded if (first, last) == (start, stop) else decoded[start - first : stop - first]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in its shape: decoded to fp32, or unchanged if it is kept."""
        form = self.forms[name]
        return self.values(name, 0, form.num_elements).view(form.shape)

    def summands(self, name: str) -> tuple[Summand, ...]:
        """A whole tensor as a sum of floating-point tensors in its shape, each with a factor."""
        form = self.forms[name]
        terms = form.summands(self.read_data(name, 0, form.num_elements), self.side(name))
        return tuple((codes.view(form.shape), factor) for codes, factor in terms)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DecodedSource:
    """The decoded values of stored tensors, under the weights' names. Closing it closes the stored tensors.

    Memory is that of the requested blocks, and of a few decoded bands of transposed weights (see `forms/grid.py`).
    """

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self.entries: dict[str, TensorEntry] = {}
        self._band = lru_cache(maxsize=_BANDS)(stored.values)  # decoded elements of whole rows
        forms = stored.forms.values()
        for info in lay_out((f.name, f.data[0].dtype if f.is_kept else "F32", f.shape) for f in forms):
            where = stored.entries[stored.forms[info.name].data[0].name]
            self.entries[info.name] = TensorEntry(info=info, file=where.file, alias_of=where.alias_of)

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        if self._stored.forms[name].is_kept:
            self._stored.read_bytes(name, start, out)
            return
        first, last = start // 4, (start + len(out)) // 4
        begin, end = self._stored.forms[name].widened(first, last)
        out[:] = self._band(name, begin, end)[first - begin : last - begin].numpy().data.cast("B")

    def close(self) -> None:
        self._band.cache_clear()
        self._stored.close()


def stored_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoded tensors by name, from headers.

    Raises the errors of `open_source`, and UnsupportedError for layouts that lpconv does not read.
    """
    with closing(open_source(checkpoint)) as source:
        headers = Headers.of(checkpoint.config, {n: e.info for n, e in source.entries.items()})
    check_readable(headers)
    return {name: form.shape for name, form in recognise(headers).items()}


def is_coded(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint must be decoded: it is quantised, or has residuals next to its weights."""
    return quantization_method(checkpoint.config) is not None or (checkpoint.directory / RESIDUAL_INDEX).exists()


def open_values(checkpoint: Checkpoint) -> Source:
    """Open the tensors of any checkpoint as plain ones. Raises UnsupportedError for layouts that lpconv does not read.

    Raises InputError like `StoredTensors.open` and `open_source`.
    """
    return DecodedSource(StoredTensors.open(checkpoint)) if is_coded(checkpoint) else open_source(checkpoint)
