"""Read the tensors of a checkpoint as what they stand for, whatever forms they are stored in, whole or in blocks.

Everybody reads through this file: checks and restoring block by block, models and exports whole tensors. It is the one
file of the forms that opens others.
"""

from __future__ import annotations  # tensors are named below and not imported

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lpconv.errors import InputError
from lpconv.forms import Component, Headers, Kept, Stored, recognise
from lpconv.forms.foreign import ACTIVATIONS, READ, check_readable, is_part
from lpconv.forms.scaled import SCALE_SUFFIX
from lpconv.forms.stored import Side, Summand
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.storage.residual import Residuals, read_residual
from lpconv.storage.source import SafetensorsSource, Source, TensorEntry, open_source, read_range, read_tensor
from lpconv.storage.staging import MARKER

if TYPE_CHECKING:
    from torch import Tensor


FETCH_AGAIN = "fetch the checkpoint again"


def open_readable(model: Openable, *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint as `Checkpoint.open` does, and check its headers before anything heavy is imported.

    Raises InputError for a header that is not sound, UnsupportedError for the layouts that are not read.
    """
    checkpoint = Checkpoint.open(model, revision=revision)
    check_readable(Headers.of(checkpoint.config, {}))  # first: headers of a layout that is not read may be odd
    check_readable(Headers.of(checkpoint.config, checkpoint.tensors))
    return checkpoint


class StoredTensors:
    """The tensors of a checkpoint under their own names. `forms` says how each is stored.

    `residuals` are what `read_residual` found, or `find_residual` for who has just written them.
    """

    def __init__(self, checkpoint: Checkpoint, residuals: Residuals | None) -> None:
        self.checkpoint = checkpoint
        with ExitStack() as opened:
            self._root = open_source(checkpoint)
            opened.callback(self._root.close)
            self._low: Source | None = None
            if residuals is not None:
                self._low = SafetensorsSource(residuals.as_checkpoint)
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
            self._sides: dict[str, Side] = {n: self.read_side(form) for n, form in self.forms.items() if form.side}
            self._opened = opened.pop_all()

    @classmethod
    def open(cls, model: Openable) -> Self:
        """All of a checkpoint, its residual proven to belong to it.

        Raises InputError where it does not, and where a scale or a residual fits no form of its tensor;
        UnsupportedError for the layouts that are not read.
        """
        checkpoint = open_readable(model)
        made = cls(checkpoint, read_residual(checkpoint.directory))
        wrong = made._disagreement(is_ours=(checkpoint.directory / MARKER).exists())
        if wrong is not None:
            made.close()
            raise InputError(wrong, hint=FETCH_AGAIN)
        return made

    def _disagreement(self, *, is_ours: bool) -> str | None:
        """What files and config say against each other, in words. An output of ours may be a mere copy."""
        stray, method = self._stray(), self._headers.quantised_by
        if stray is not None:
            return f"`{stray}` is not stored in a form that lpconv knows"
        if method in READ and not is_ours and all(isinstance(form, Kept) for form in self.forms.values()):
            return f"config.json says that the weights are quantised by `{method}`, and none is"
        return None

    def _stray(self) -> str | None:
        """A tensor that no form has, or one beside which something lies that its form does not have."""
        headers = self._headers
        lone = [n for n in headers.low if n not in self.forms or not self.forms[n].data[1:]]
        if headers.quantised_by is not None:
            known = {c.name for form in self.forms.values() for c in form.components}
            lone += [n for n in headers.root if n not in known and n.rpartition(".")[2] not in ACTIVATIONS]
            lone += [n for n in self.forms if n.endswith(SCALE_SUFFIX) and n.removesuffix(SCALE_SUFFIX) in self.forms]
        if headers.quantised_by in READ:
            kept = {n: form.dtype for n, form in self.forms.items() if isinstance(form, Kept)}
            lone += [n for n, dtype in kept.items() if is_part(n, dtype, self.forms)]
        return next(iter(lone), None)

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """What the root files hold."""
        return self._root.entries

    def file_of(self, name: str) -> str:
        """The root file that a tensor's codes lie in."""
        return self._root.entries[self.forms[name].data[0].name].file

    @property
    def with_residual(self) -> frozenset[str]:
        """The tensors that a residual completes."""
        return frozenset(self._headers.low)

    def side(self, name: str) -> Side:
        """The side tensors of a tensor, empty where its form has none."""
        return self._sides.get(name, {})

    def holds(self, form: Stored) -> bool:
        """Whether a tensor is stored as `form` has it, with nothing beside."""
        found = {c.name for c in self.forms[form.name].components}
        return found == {c.name for c in form.components} and all(map(self._headers.holds, form.components))

    def read_side(self, form: Stored) -> Side:
        """The side tensors of a form. Raises InputError where they make no sense."""
        side = {c.name: read_tensor(self._root, c.name) for c in form.side}
        if not form.has_sound(side):
            raise InputError(f"the scales of `{form.name}` make no sense for its {form.words}", hint=FETCH_AGAIN)
        return side

    def stored(self, name: str, start: int, stop: int) -> tuple[Tensor, ...]:
        """The data of elements `start` to `stop` as they lie in the files."""
        return self.read(self.forms[name], start, stop, self.side(name))

    def read(self, form: Stored, start: int, stop: int, side: Side) -> tuple[Tensor, ...]:
        """What `form` needs of the files for elements `start` to `stop`."""
        return form.read(self._fetch, start, stop, side)

    def parts(self, name: str) -> Side:
        """All that is stored of a tensor, whole, by the names in the files."""
        data = (c for c in self.forms[name].components if c.name not in self.side(name))
        return {**self.side(name), **{c.name: read_tensor(self._file(c.in_residual), c.name) for c in data}}

    def others(self) -> Side:
        """What the root holds beside the weights, whole: scales of activations, which are left out of `forms`."""
        known = {c.name for form in self.forms.values() for c in form.components}
        return {n: read_tensor(self._root, n) for n in self.entries if n not in known}

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a stored tensor of the root, as `Source.read_bytes`."""
        self._root.read_bytes(name, start, out)

    def _fetch(self, component: Component, start: int, stop: int) -> Tensor:
        return read_range(self._file(component.in_residual), component.name, start, stop)

    def _file(self, in_residual: bool) -> Source:
        if not in_residual:
            return self._root
        assert self._low is not None
        return self._low

    def values(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor, 1-D: decoded to fp32, or kept as they are."""
        first, last = self.forms[name].widened(start, stop)
        decoded = self.forms[name].decode(self.stored(name, first, last), first, last, self.side(name))
        return decoded if (first, last) == (start, stop) else decoded[start - first : stop - first]

    def tensor(self, name: str) -> Tensor:
        """One whole tensor in its shape: decoded to fp32, or kept as it is."""
        form = self.forms[name]
        return self.values(name, 0, form.num_elements).view(form.shape)

    def summands(self, name: str) -> tuple[Summand, ...]:
        """One whole tensor as a sum of floating-point tensors in its shape, each times a factor."""
        form = self.forms[name]
        found = form.summands(self.stored(name, 0, form.num_elements), self.side(name))
        return tuple((codes.view(form.shape), factor) for codes, factor in found)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
