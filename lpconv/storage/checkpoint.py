"""A checkpoint, opened once and passed on: its origin, files, config, headers and residual. No torch.

`Checkpoint.watch` detects a source that changes while it is read: the output would be neither the old nor the new one.

`collage/residual.json` names the form of the residual and, for each residual file, the root file that it completes with
that file's SHA-256. Users fine-tune the root and keep a stale residual; adding the two would be silent noise.
"""

import functools
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lpconv.errors import InputError, UsageError
from lpconv.gguf.view import as_directory, header_in
from lpconv.results import FileRecord, SourceRecord
from lpconv.storage.contents import check_inside, find_ignored, find_side_files, find_weights, read_config, read_json
from lpconv.storage.header import MAX_HEADER_BYTES, Header, TensorInfo, read_header
from lpconv.storage.place import open_regular, reading, sha256_of
from lpconv.storage.remote import changed_error, is_url
from lpconv.storage.resolve import Resolved, check_promises, resolve
from lpconv.storage.staging import check_apart

RESIDUAL_FOLDER = "collage"
RESIDUAL_INDEX = f"{RESIDUAL_FOLDER}/residual.json"
_RESIDUAL_VERSION = 1
Openable: TypeAlias = "str | Path | Checkpoint"  # accepted by `Checkpoint.open`
_END_BYTES = 2**16  # hashed of other files: a zip has its table, with checksums of all members, at the end


def name_of(model: Openable) -> str:
    """The user's name for a model, which need not be open yet."""
    return model.origin.name if isinstance(model, Checkpoint) else str(model)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose names, sizes and shapes are known, but whose weights have not been read.

    `origin` is the name as typed and its directory. `kind` is ``safetensors``, ``torch`` or ``gguf``; `weight_files`
    are in index order. `weight_map` maps tensor names to files as in the index, or is None without an index.
    `side_files` are paths relative to `directory`, sorted.
    """

    origin: Resolved
    kind: str
    weight_files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    config: dict[str, Any]
    side_files: tuple[str, ...]

    @classmethod
    def open(cls, model: "Openable", *, revision: str | None = None, whole: bool = False) -> "Checkpoint":
        """Open a name that `resolve` knows, the path of a directory, or a checkpoint that is already open.

        Raises the errors of `resolve`; InputError for a directory without config or weights, for a damaged index, and
        for names or symbolic links that lead out of the directory.
        """
        if isinstance(model, Checkpoint):
            return model
        if not isinstance(model, str | Path):
            raise UsageError(
                f"a model is a name or a path, not {model!r:.40}", hint="for example `demo` or a directory"
            )
        if isinstance(model, Path):
            origin = Resolved(name=str(model), resolved=str(model.absolute()), directory=as_directory(model))
        else:
            origin = resolve(model, revision=revision, whole=whole)
        config = read_config(origin.directory)
        kind, weight_files, weight_map = find_weights(origin.directory, config)
        return cls(
            origin=origin,
            kind=kind,
            weight_files=weight_files,
            weight_map=weight_map,
            config=config,
            side_files=find_side_files(origin.directory, weight_files),
        )

    @classmethod
    def of_files(cls, name: str, directory: Path, files: Iterable[str]) -> "Checkpoint":
        """Some safetensors files of a directory, without config, as a checkpoint called `name`."""
        origin = Resolved(name=name, resolved=str(directory), directory=directory)
        return cls(
            origin=origin, kind="safetensors", weight_files=tuple(files), weight_map=None, config={}, side_files=()
        )

    @property
    def directory(self) -> Path:
        """The directory of its files, or of pointers to remote files."""
        return self.origin.directory

    @functools.cached_property
    def headers(self) -> Mapping[str, Header]:
        """The checked header of each weight file, read once; empty for pickles. Raises the errors of `read_header`."""
        if self.kind == "torch":
            return {}
        return {name: self.read_header(name) for name in self.weight_files}

    def read_header(self, name: str) -> Header:
        """The checked header of one weight file."""
        path = self.directory / name
        return read_header(path) if self.kind == "safetensors" else header_in(self.config, path)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors of the weight files by name; empty for pickles. Raises the errors of `read_header`."""
        return {name: info for header in self.headers.values() for name, info in header.tensors.items()}

    def check_apart(self, output: Path | str) -> None:
        """Refuse an output that would replace files of this checkpoint, or lie among them. Raises OutputExistsError.

        An output called like a model that is not a directory here would be hidden by it, or hide it: UsageError.
        """
        check_apart(self.directory, output)
        if str(output) == self.origin.name and not (is_url(self.origin.name) or os.path.exists(output)):
            raise UsageError(f"a directory `{output}` could not be told from the model", hint=f"use -o {output}-out")
        if is_url(self.origin.resolved) or os.path.isabs(self.origin.resolved):  # a URL, or a file whose view is cached
            check_apart(self.origin.resolved, output)

    def local_copy(self) -> "Checkpoint":
        """The same checkpoint with all files on this machine; files at a URL are copied."""
        name, revision = self.origin.name, self.origin.revision
        return Checkpoint.open(name, revision=revision, whole=True) if is_url(name) else self

    def check_promised(self) -> dict[str, str]:
        """Check the files against the hub's SHA-256 hashes, and return these. Call before weights are read.

        Every file is hashed the first time only. Raises InputError for a file with another hash.
        """
        return check_promises(self.directory) if self.origin.revision is not None else {}

    def record(self, hash_of: Callable[[str], str | None] = lambda name: None) -> SourceRecord:
        """The record of this source, with sizes of its weight files and the hashes that `hash_of` knows by name."""
        files = (
            FileRecord(name=name, size_bytes=(self.directory / name).stat().st_size, sha256=hash_of(name))
            for name in self.weight_files
        )
        origin = self.origin
        return SourceRecord(name=origin.name, resolved=origin.resolved, revision=origin.revision, files=tuple(files))

    def watch(self, *more: str) -> "Watch":
        """Record the state of all files that a conversion reads, and of `more`, so that changes can be detected."""
        indexes = sorted(p.name for p in self.directory.glob("*.index.json"))
        names = [*more, *self.weight_files, "config.json", *indexes, *self.side_files, *self._residual_files]
        return Watch(directory=self.directory, seen={name: _file_state(self.directory / name) for name in names})

    @property
    def ignored_files(self) -> tuple[str, ...]:
        """Files with weights next to its own that neither lpconv nor transformers reads, sorted."""
        return find_ignored(self.directory, {*self.weight_files, *self.side_files, *self._residual_files})

    @property
    def _residual_files(self) -> tuple[str, ...]:
        residual = find_residual(self.directory)
        return residual.files if residual else ()


@dataclass(frozen=True, kw_only=True)
class Watch:
    """State of some files at one time: size, modification time, inode, and a hash of their headers."""

    directory: Path
    seen: Mapping[str, tuple[int, int, int, str]]

    def check(self) -> None:
        """Raise InputError for the first file that has changed since."""
        for name, before in self.seen.items():
            if _file_state(self.directory / name) != before:
                raise changed_error(self.directory / name, file=name)


def _file_state(path: Path) -> tuple[int, int, int, str]:
    with reading(path), suppress(FileNotFoundError), open(path, "rb", opener=open_regular) as f:
        status = path.stat()
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))
            ends = f.read(min(length, MAX_HEADER_BYTES))
        else:
            ends = f.read(_END_BYTES)
            f.seek(max(0, status.st_size - _END_BYTES))
            ends += f.read()
        return status.st_size, status.st_mtime_ns, status.st_ino, hashlib.sha256(ends).hexdigest()
    return -1, 0, 0, ""


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Residual files: `form` is a key of `lpconv.mcf.split.RESIDUALS`; `roots` are pairs (root file, its SHA-256)."""

    form: str
    directory: Path
    files: tuple[str, ...]
    roots: tuple[tuple[str, str], ...]


def residual_index(form: str, pairs: list[tuple[str, str, str]]) -> dict[str, Any]:
    """The document of `RESIDUAL_INDEX`; `pairs` holds (residual file, root file, root's SHA-256)."""
    return {
        "format_version": _RESIDUAL_VERSION,
        "residual": form,
        "files": {low: {"root": root, "root_sha256": digest} for low, root, digest in pairs},
    }


def read_residual(directory: Path) -> Residuals | None:
    """The residual of a checkpoint, or None. Raises InputError if a root file has changed."""
    residual = find_residual(directory)
    for name, digest in residual.roots if residual else ():
        if sha256_of(directory / name, stored=False) != digest:
            raise InputError(
                f"`{name}` has changed since its residual was written",
                hint="the residual belongs to other weights; delete the collage folder to use the bf16 weights alone",
            )
    return residual


def find_residual(directory: Path) -> Residuals | None:
    """`read_residual` without reading the root files, for a writer that has just hashed them."""
    path = directory / RESIDUAL_INDEX
    if not path.exists():
        return None
    document = read_json(path)
    if document.get("format_version") != _RESIDUAL_VERSION:
        raise InputError(
            f"`{path}` has format_version {document.get('format_version')}", hint="update lpconv to open it"
        )
    form, files = document.get("residual"), document.get("files")
    if not isinstance(form, str) or not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise InputError(f"`{path}` is not a residual index", hint="download the checkpoint again")
    for low, entry in files.items():
        for name in (low, entry["root"]):
            check_inside(directory, name)
    roots = tuple((entry["root"], entry["root_sha256"]) for entry in files.values())
    return Residuals(form=form, directory=directory, files=tuple(files), roots=roots)


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("root", "root_sha256"))
