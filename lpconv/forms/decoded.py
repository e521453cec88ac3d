"""Any checkpoint as a source of plain tensors, decoded while they are read.

Decoded tensors are fp32, which represents the values of every form exactly; kept tensors keep their dtype. Memory is
that of the requested blocks, and of a few decoded bands of transposed weights (see `foreign/grid.py`).
"""

from __future__ import annotations  # tensors are named below and not imported

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import closing
from threading import Lock
from typing import TYPE_CHECKING

from lpconv.forms import Headers, Kept, recognise
from lpconv.forms.foreign import check_readable
from lpconv.forms.reader import StoredTensors
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.compressed import quantization_method
from lpconv.storage.header import TensorInfo
from lpconv.storage.residual import RESIDUAL_INDEX
from lpconv.storage.source import Source, TensorEntry, open_source

if TYPE_CHECKING:
    from torch import Tensor


_BANDS = 4  # cached bands, enough for a few threads that read side by side


class DecodedSource:
    """The decoded values of stored tensors, under the weights' names. Closing it closes the stored tensors."""

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self._entries: dict[str, TensorEntry] = {}
        self._bands: OrderedDict[tuple[str, int, int], Tensor] = OrderedDict()
        self._lock = Lock()
        position = 0
        for name, form in stored.forms.items():
            where = stored.entries[form.data[0].name]
            dtype, size = ("F32", 4 * form.num_elements)
            if isinstance(form, Kept):
                dtype, size = where.info.dtype, where.info.num_bytes
            info = TensorInfo(name=name, dtype=dtype, shape=form.shape, begin=position, end=position + size)
            position += size
            self._entries[name] = TensorEntry(info=info, file=where.file, alias_of=where.alias_of)

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read_bytes(self, name: str, start: int, out: memoryview) -> None:
        if isinstance(self._stored.forms[name], Kept):
            self._stored.read_bytes(name, start, out)
            return
        first, last = start // 4, (start + len(out)) // 4
        begin, end = self._stored.forms[name].widened(first, last)
        out[:] = self._band(name, begin, end)[first - begin : last - begin].numpy().data.cast("B")

    def _band(self, name: str, begin: int, end: int) -> Tensor:
        """Decoded elements of whole rows; the last few results are cached."""
        key = name, begin, end
        with self._lock:
            if key in self._bands:
                return self._bands[key]
        values = self._stored.values(name, begin, end)
        with self._lock:
            self._bands[key] = values
            if len(self._bands) > _BANDS:
                self._bands.popitem(last=False)
        return values

    def close(self) -> None:
        self._bands.clear()
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
