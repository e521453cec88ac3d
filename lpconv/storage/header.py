"""The safetensors header: read with checks, written to the specification. Plain Python, no torch.

A file is an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes end to end. Reading checks
what the format guarantees and a converter relies on: the length fits the file, names are unique, every dtype is known,
every size is shape times dtype, and the byte ranges cover the payload without holes, overlaps or a missing tail.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, UnsupportedError
from lpconv.report.printable import printable
from lpconv.storage.place import open_file, open_regular, reading

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64  # as in torch and numpy
MAX_TENSORS = 2**18  # of one file; shards of published models have a few thousand
_METADATA = "__metadata__"

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file: `begin` and `end` are byte offsets into the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Header:
    """A checked header. `data_start` is the offset of the payload in the file; tensors are in file order."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises InputError for a file that is unreadable, truncated or inconsistent, and UnreadError, a kind of it, if disk
    or network fail.
    """
    with reading(path):
        check_not_pointer(path)
    with reading(path), closing(open_file(path)) as f:
        size = f.size_bytes
        if size < 8:
            raise _corrupt(path, f"{size} bytes are too few for a header")
        prefix = bytearray(8)
        f.read_into(0, memoryview(prefix))
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise _corrupt(path, f"the header claims {length} bytes, but the file has {size}")
        raw = bytearray(length)
        f.read_into(8, memoryview(raw))
    return _parse_header(raw, file_size=size, path=path)


LFS_HINT = "run `git lfs pull` in the checkout, or download the file with `hf download`"


def check_not_pointer(path: Path) -> None:
    """Raise InputError for the pointer that Git LFS leaves in place of a file."""
    if is_lfs_pointer(path):
        raise InputError(f"`{path}` is a Git LFS pointer, not the file that it stands for", hint=LFS_HINT)


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is the pointer that Git LFS leaves in its place."""
    with open(path, "rb", opener=open_regular) as f:
        return f.read(23) == b"version https://git-lfs"


def _parse_header(raw: bytes | bytearray, *, file_size: int, path: Path) -> Header:
    """Check a header from its JSON bytes; `path` is for messages only."""
    document = _load_json(raw, path)
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(path, "__metadata__ is not a table of strings")
    tensors = sorted((_tensor(name, entry, path) for name, entry in document.items()), key=lambda t: (t.begin, t.end))
    data_start = 8 + len(raw)
    position = 0
    for t in tensors:
        if t.begin != position:
            what = "overlaps the tensor before it" if t.begin < position else "leaves a hole before it"
            raise _corrupt(path, f"tensor `{t.name}` {what} (offset {t.begin}, expected {position})")
        position = t.end
    if data_start + position != file_size:
        state = "cut short" if data_start + position > file_size else "longer than its header says"
        raise _corrupt(
            path, f"the file is {state}: it has {file_size} bytes, but its header describes {data_start + position}"
        )
    return Header(tensors={t.name: t for t in tensors}, metadata=dict(metadata), data_start=data_start)


def check_name(name: object, path: Path) -> None:
    """Raise InputError for a tensor name that no header can hold, or that is not printable."""
    if not isinstance(name, str) or name == _METADATA:
        raise InputError(f"`{path}`: {name!r} is not the name of a tensor", hint="check that it is a model checkpoint")
    if not name.isprintable():
        raise InputError(f"`{path}`: tensor name {name!r} has unprintable characters", hint="rename the tensor")


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, alignment: int = 1) -> tuple[TensorInfo, ...]:
    """Header entries of tensors (name, dtype, shape), one after the other, each at a multiple of `alignment` bytes."""
    position, infos = 0, []
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
        infos.append(TensorInfo(name=name, dtype=dtype, shape=shape, begin=position, end=end))
        position = -(-end // alignment) * alignment
    return tuple(infos)


def encode_header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON, padded with spaces to a multiple of 8 so that the payload is aligned."""
    document: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    for t in tensors:
        document[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _corrupt(path: Path, what: str) -> InputError:
    return InputError(
        f"`{path}` is not a valid safetensors file: {what}", hint="download the file again and compare its checksum"
    )


def _load_json(raw: bytes | bytearray, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as e:
        raise _corrupt(path, f"the header is not UTF-8 ({e.reason} at byte {e.start})") from e
    except (ValueError, RecursionError) as e:
        raise _corrupt(path, f"the header is not JSON ({e})") from e
    if not isinstance(document, dict):
        raise _corrupt(path, "the header is not a JSON object")
    if len(document) > MAX_TENSORS:
        raise _corrupt(path, f"it has {len(document)} tensors, more than {MAX_TENSORS}")
    return document


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON document, for its `object_pairs_hook`. Raises ValueError if a key occurs twice."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key `{printable(key):.80}` occurs twice")
        table[key] = value
    return table


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor(name: str, entry: object, path: Path) -> TensorInfo:
    check_name(name, path)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(path, f"tensor `{name}` has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UnsupportedError(
            f"`{path}`: tensor `{name}` has unknown dtype {dtype!r}", hint="known: " + ", ".join(DTYPE_BITS)
        )
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise _corrupt(path, f"tensor `{name}` has a shape that is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise _corrupt(path, f"tensor `{name}` has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _corrupt(path, f"tensor `{name}` has data_offsets that are not a pair of sizes")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise _corrupt(path, f"tensor `{name}`: {end - begin} bytes do not fit {dtype} of shape {tuple(shape)}")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` in config.json, or None for an unquantised checkpoint."""
    settings = config.get("quantization_config")
    return str(settings.get("quant_method", "another method")) if isinstance(settings, dict) else None
