"""Read a converted checkpoint back: records from `lpconv.json`, values decoded block by block."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from lpconv.checkpoint.compressed import is_ours
from lpconv.checkpoint.contents import Contents, read_contents, read_json
from lpconv.checkpoint.residual import Residuals, read_residual
from lpconv.checkpoint.source import (
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    SafetensorsSource,
    TensorEntry,
    read_range,
    read_tensor,
)
from lpconv.checkpoint.staging import MARKER
from lpconv.convert.encode import decode_scaled
from lpconv.convert.plan import POINTS_SUFFIX, SCALE_SUFFIX
from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.spec import FORMATS
from lpconv.lookup import find
from lpconv.mcf import multipoint
from lpconv.mcf.multipoint import Points
from lpconv.mcf.split import RESIDUALS, Residual
from lpconv.results import TensorRecord, from_json

__all__ = ["OutputReader", "read_provenance"]

_FORMAT_VERSION = 1
_FETCH_AGAIN = "fetch the checkpoint again"
# What else may have a lpconv.json.
_OTHER_KINDS = {"onnx": "a checkpoint exported to ONNX", "restore": "a restored checkpoint"}
# What is read from lpconv.json, and the JSON type it has.
_PROVENANCE = {"method": str, "source": dict, "source_config": dict, "tensors": list}


def read_provenance(directory: Path) -> dict[str, Any]:
    """The document `lpconv.json` of an output. Raises InputError where there is none, a broken one or a newer one."""
    if not (directory / MARKER).exists():
        raise InputError(f"`{directory}` has no {MARKER}", hint="pass an output of `lpconv convert`")
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
        raise InputError(f"`{directory / MARKER}` has no {' and no '.join(wrong)}", hint="fetch the output again")
    return document


class OutputReader:
    """The tensors of a converted checkpoint under their source names.

    `records` says how each was converted and `residuals` what completes them; `from_directory` takes both from the
    output itself, and checks that they belong together.
    """

    def __init__(self, directory: Path, records: Sequence[TensorRecord], residuals: Residuals | None) -> None:
        contents = read_contents(directory)
        self.records = {r.name: r for r in records if r.action != "tie"}
        self._axis = () if is_ours(contents) else (1,)
        self._form = _form(residuals.form) if residuals else None
        self._root = SafetensorsSource(contents)
        self._low: SafetensorsSource | None = None
        try:
            self._low = _residual_source(contents, residuals.files) if residuals else None
            self._scales = {r.name: self._scale(r) for r in self.records.values() if r.scale is not None}
            for record in self.records.values():
                self._check(record)
            self._points = {r.name: self._read_points(r) for r in self.records.values() if r.points is not None}
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        document = read_provenance(directory)
        return cls(directory, from_json(tuple[TensorRecord, ...], document["tensors"]), read_residual(directory))

    @property
    def form(self) -> str:
        """The residual's form, a key of `RESIDUALS`; empty for scaled checkpoints."""
        return self._form.name if self._form else ""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._root.entries

    def _check(self, record: TensorRecord) -> None:
        """Raises InputError where the files do not hold what the record says."""
        fits = _holds(self._root, record.name, *_stored_form(record, self._axis))
        if record.points is not None:
            fits = fits and _holds(self._root, record.name + SCALE_SUFFIX, "F32", (record.points,))
            fits = fits and _holds(self._root, record.name + POINTS_SUFFIX, "U8", record.shape[:-1])
        elif record.action == "convert" and record.scale is None:
            low = SAFETENSORS_DTYPES[self._form.dtype] if self._form else ""
            fits = fits and self._low is not None and _holds(self._low, record.name, low, record.shape)
        if not fits:
            raise InputError(f"tensor `{record.name}` is not stored as {MARKER} says", hint=_FETCH_AGAIN)

    def _scale(self, record: TensorRecord) -> float:
        name = record.name + SCALE_SUFFIX
        if name not in self.entries:
            raise InputError(f"the codes of `{record.name}` have no scale", hint=_FETCH_AGAIN)
        raw = torch.empty(4, dtype=torch.uint8)
        self._root.read_bytes(name, 0, raw)
        return float(raw.view(torch.float32))

    def _read_points(self, record: TensorRecord) -> Points:
        """Raises InputError where the points of the rows are not as many as there are."""
        counts = read_tensor(self._root, record.name + POINTS_SUFFIX).view(-1)
        if int(counts.sum()) != record.points or (counts.numel() and not int(counts.min())):
            raise InputError(f"the points of `{record.name}` are not those of its rows", hint=_FETCH_AGAIN)
        return Points(counts_R=counts, scales_P=read_tensor(self._root, record.name + SCALE_SUFFIX))

    def points(self, name: str, start: int, stop: int) -> Points:
        """The points of rows `start` to `stop` of a tensor that has points."""
        return self._points[name].rows(start, stop)

    def whole_rows(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The range of elements, widened to the rows it touches where rows are stored as points."""
        if name not in self._points:
            return start, stop
        cols = self.records[name].shape[-1]
        return start // cols * cols, -(-stop // cols) * cols

    def stored(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` as they lie in the root file: codes, 16-bit numbers, or the kept tensor."""
        return _range(self._root, name, start, stop)

    def values(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a converted tensor, decoded to fp32."""
        if name in self._points:
            return self._sums(name, start, stop)
        stored = self.stored(name, start, stop)
        if name in self._scales:
            return decode_scaled(stored, self._scales[name])
        assert self._form is not None
        assert self._low is not None
        return self._form.merge(stored, _range(self._low, name, start, stop))

    def _sums(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor whose rows are sums of points."""
        record = self.records[name]
        cols, (_, _, row_bytes) = record.shape[-1], self.entries[name].info.shape
        first, last = (n // cols for n in self.whole_rows(name, start, stop))
        before, points = int(self._points[name].counts_R[:first].sum()), self.points(name, first, last)
        begin, end = before * row_bytes, (before + points.scales_P.numel()) * row_bytes
        coded = _range(self._root, name, begin, end).view(torch.uint8).view(-1, row_bytes)
        rows = multipoint.decode(coded, points, FORMATS[record.format])
        return rows.view(-1)[start - first * cols : stop - first * cols]

    def close(self) -> None:
        self._root.close()
        if self._low is not None:
            self._low.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _form(name: str) -> Residual:
    return find("residual", name, RESIDUALS, error=InputError)


def _stored_form(record: TensorRecord, axis: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of a tensor in the root file; the dtype is empty for records that make no sense.

    `axis` is what leads the shape of scaled codes.
    """
    if record.action == "keep":
        return record.source_dtype, record.shape
    if record.action != "convert" or record.source_dtype not in TORCH_DTYPES or record.format not in FORMATS:
        return "", ()
    fmt = FORMATS[record.format]
    if record.points is not None:
        row_bytes = record.shape[-1] * fmt.storage_bits // 8 if record.shape else 0
        return fmt.safetensors or "U8", (1, record.points, row_bytes)
    return fmt.safetensors or "", record.shape if record.scale is None else (*axis, *record.shape)


def _holds(source: SafetensorsSource, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    entry = source.entries.get(name)
    return entry is not None and (entry.info.dtype, entry.info.shape) == (dtype, shape)


def _residual_source(contents: Contents, files: tuple[str, ...]) -> SafetensorsSource:
    return SafetensorsSource(
        Contents(
            directory=contents.directory,
            kind="safetensors",
            weight_files=files,
            weight_map=None,
            config={},
            side_files=(),
        )
    )


def _range(source: SafetensorsSource, name: str, start: int, stop: int) -> Tensor:
    if name not in source.entries:
        raise InputError(f"tensor `{name}` is not in the checkpoint", hint=_FETCH_AGAIN)
    return read_range(source, name, start, stop)
