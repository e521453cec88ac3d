"""A checkpoint, opened once and handed on: where it came from, its files, its config and its headers. No torch."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from lpconv.storage.contents import find_side_files, find_weights, read_config
from lpconv.storage.gguf import as_directory, header_of
from lpconv.storage.header import Header, TensorInfo
from lpconv.storage.promised import check_promises
from lpconv.storage.resolve import Resolved, resolve
from lpconv.storage.urls import is_url

Openable: TypeAlias = "str | Path | Checkpoint"  # what `Checkpoint.open` takes


def name_of(model: Openable) -> str:
    """What the user calls a model, which need not be opened yet."""
    return model.origin.name if isinstance(model, Checkpoint) else str(model)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose names, sizes and shapes are known, and whose weights nobody has read.

    `origin` says what was asked for and where that lies. `kind` is ``safetensors``, ``torch`` or ``gguf``;
    `weight_files` are in index order. `weight_map` is the index's table of tensor names to files, None without an
    index. `side_files` are paths relative to `directory`, sorted.
    """

    origin: Resolved
    kind: str
    weight_files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    config: dict[str, Any]
    side_files: tuple[str, ...]

    @classmethod
    def open(cls, model: "Openable", *, revision: str | None = None) -> "Checkpoint":
        """Open what `model` means: a name that `resolve` knows, the path of a directory, or an open checkpoint.

        Raises what `resolve` does; InputError for a directory without config or weights, for an index that is not
        sound, and for names or symbolic links that lead out of it.
        """
        if isinstance(model, Checkpoint):
            return model
        if isinstance(model, Path):
            return cls.at(Resolved(name=str(model), resolved=str(model.absolute()), directory=model))
        return cls.at(resolve(model, revision=revision))

    @classmethod
    def at(cls, origin: Resolved) -> "Checkpoint":
        """Open the directory that a name was found to mean; raises InputError as `open` does."""
        directory = as_directory(origin.directory)
        config = read_config(directory)
        kind, weight_files, weight_map = find_weights(directory)
        return cls(
            origin=replace(origin, directory=directory),
            kind=kind,
            weight_files=weight_files,
            weight_map=weight_map,
            config=config,
            side_files=find_side_files(directory, weight_files),
        )

    @property
    def directory(self) -> Path:
        """Where its files lie, or what stands for them."""
        return self.origin.directory

    @functools.cached_property
    def headers(self) -> Mapping[str, Header]:
        """The checked header of each weight file, read once; none for pickles. Raises as `read_header` does."""
        if self.kind == "torch":
            return {}
        return {name: header_of(self.directory / name, self.config) for name in self.weight_files}

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the weight files by its name; none for pickles. Raises as `read_header` does."""
        return {name: info for header in self.headers.values() for name, info in header.tensors.items()}

    def copied(self) -> "Checkpoint":
        """The same checkpoint, with all files on this machine: those at a URL are copied."""
        origin = self.origin
        return (
            Checkpoint.at(resolve(origin.name, revision=origin.revision, whole=True)) if is_url(origin.name) else self
        )

    def check_promised(self) -> dict[str, str]:
        """The SHA-256 of those files that the hub promised one for; call it before weights are read.

        Every file is hashed the first time only. Raises InputError for a file that is not what was promised.
        """
        return check_promises(self.directory) if self.origin.revision is not None else {}
