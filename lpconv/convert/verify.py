"""Is the output what it should be? Files against their hashes, weights against the source, outputs against outputs.

Weights are decoded from the files as they lie on the disk and compared with what the slow reference of their form gives
for the source's values: an implementation that the encoder does not share.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lpconv.checkpoint.header import DTYPE_BITS
from lpconv.checkpoint.partfile import sha256_of
from lpconv.checkpoint.source import Source, read_range
from lpconv.checkpoint.staging import MARKER
from lpconv.convert.reader import OutputReader
from lpconv.convert.tensor_records import sqnr_db
from lpconv.errors import InputError
from lpconv.forms.blocks import block_ranges
from lpconv.progress import Progress
from lpconv.results import HashCheck, TensorRecord, WeightsCheck

__all__ = ["SUMS", "check_hashes", "check_samples", "check_weights"]

SUMS = "SHA256SUMS"
_SAMPLE_ELEMENTS = 2**14


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A tensor beside the source's: whether it is right, Σx², Σ(x - x̂)² and max |x - x̂| / |x|."""

    right: bool = True
    signal: float = 0.0
    noise: float = 0.0
    max_relative: float = 0.0

    def __add__(self, other: "_Compared") -> "_Compared":
        return _Compared(
            right=self.right and other.right,
            signal=self.signal + other.signal,
            noise=self.noise + other.noise,
            max_relative=max(self.max_relative, other.max_relative),
        )

    @property
    def sqnr_db(self) -> float:
        return sqnr_db(self.signal, self.noise)


def check_hashes(directory: Path, progress: Progress) -> HashCheck:
    """Every file that SHA256SUMS lists, and must list. Raises InputError where there is no such list."""
    path = directory / SUMS
    if not path.exists():
        raise InputError(f"`{directory}` has no {SUMS}", hint="pass an output of `lpconv convert`")
    files = _read_sums(path)
    there = {n: (directory / n).stat().st_size for n in files if os.path.isfile(directory / n)}
    progress.start("hashing", sum(there.values()))
    weights = {p.relative_to(directory).as_posix() for p in directory.rglob("*.safetensors")}
    mismatched = sorted({"config.json", MARKER, *weights} - files.keys())
    for name, digest in files.items():
        if name not in there or sha256_of(directory / name) != digest:
            mismatched.append(name)
        progress.advance(there.get(name, 0))
    return HashCheck(num_files=len(files), mismatched=tuple(mismatched))


def _read_sums(path: Path) -> dict[str, str]:
    """Names and digests of a list that `sha256sum` writes."""
    files = {}
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        digest, separator, name = line.partition("  ")
        if not separator:
            raise InputError(f"`{path}` has the line {line[:80]!r}, not a hash and a name", hint="fetch the file again")
        files[name] = digest
    return files


def check_samples(source: Source, output: OutputReader) -> tuple[int, tuple[str, ...]]:
    """Compare the first, a middle and the last piece of every tensor; (elements compared, names that differ)."""
    count, mismatched = 0, []
    for record in output.records.values():
        for start, stop in _sample_ranges(math.prod(record.shape)):
            count += stop - start
            place = output.widened(record.name, start, stop)
            value, got = _both(source, output, record, *place)
            if not _is_right(value, got, output, record, place[0]):
                mismatched.append(record.name)
                break
    return count, tuple(mismatched)


def check_weights(source: Source, output: OutputReader, progress: Progress) -> WeightsCheck:
    """Compare every element of every tensor, and measure the errors again from the files."""
    progress.start("comparing weights", sum(source.entries[n].info.num_bytes for n in output.records))
    found = {name: _compare(source, output, record, progress) for name, record in output.records.items()}
    converted = {name: found[name] for name, record in output.records.items() if record.action == "convert"}
    worst = min(converted, key=lambda n: converted[n].sqnr_db, default=None)
    sqnr = math.inf if worst is None else converted[worst].sqnr_db
    return WeightsCheck(
        max_rel_error=max((c.max_relative for c in converted.values()), default=0.0),
        min_sqnr_db=sqnr,
        worst=worst if sqnr < math.inf else None,
        num_tensors=len(converted),
        num_elements_checked=sum(math.prod(r.shape) for r in output.records.values()),
        mismatched=tuple(name for name, c in found.items() if not c.right),
    )


def _compare(source: Source, output: OutputReader, record: TensorRecord, progress: Progress) -> _Compared:
    total = _Compared()
    for start, stop in block_ranges(math.prod(record.shape), output.forms[record.name].cols):
        value, got = _both(source, output, record, start, stop)
        errors = _errors(value, got) if record.action == "convert" else _Compared()
        total = total + errors + _Compared(right=_is_right(value, got, output, record, start))
        progress.advance((stop - start) * DTYPE_BITS[record.source_dtype] // 8)
    return total


def _sample_ranges(num_elements: int) -> Iterator[tuple[int, int]]:
    """At most three pieces, the first, a middle and the last, on even offsets so that packed formats divide."""
    if num_elements <= 3 * _SAMPLE_ELEMENTS:
        if num_elements:
            yield 0, num_elements
        return
    last = (num_elements - _SAMPLE_ELEMENTS) // 8 * 8
    middle = last // 16 * 8
    yield from ((0, _SAMPLE_ELEMENTS), (middle, middle + _SAMPLE_ELEMENTS), (last, num_elements))


def _both(source: Source, output: OutputReader, record: TensorRecord, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Elements of the source and of the output: as they lie there where they were kept, else in fp32."""
    original = read_range(source, record.name, start, stop)
    if record.action == "keep":
        return original, output.stored(record.name, start, stop)[0]
    return original.float(), output.values(record.name, start, stop)


def _is_right(value: Tensor, got: Tensor, output: OutputReader, record: TensorRecord, start: int) -> bool:
    """Whether `got` is what the source's `value` should have become, with the scale that the record names."""
    form, side = output.forms[record.name], output.side(record.name)
    return form.scale(side) == record.scale and form.is_right(value, got, start, side)


def _errors(value: Tensor, got: Tensor) -> _Compared:
    """Sums and the largest relative error over finite elements, in fp64."""
    finite = torch.isfinite(value)
    x, y = value[finite].double(), got[finite].double()
    error = x - y
    relative = (error / x).nan_to_num_(0.0, math.inf, -math.inf).abs()
    return _Compared(
        signal=float(x @ x),
        noise=float(error @ error),
        max_relative=float(relative.max()) if relative.numel() else 0.0,
    )
