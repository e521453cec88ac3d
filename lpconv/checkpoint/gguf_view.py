"""The view of a GGUF file as a checkpoint directory, made once for each file, in a cache."""

import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from lpconv.checkpoint.gguf import GGUF
from lpconv.checkpoint.place import cache_folder
from lpconv.errors import InputError, UnsupportedError
from lpconv.version import __version__


def as_directory(path: Path) -> Path:
    """The view of a GGUF file, or of the only one in a directory without config.json; any other path as it is.

    Raises InputError for a file that is not sound, UnsupportedError for types and architectures that are not read.
    """
    file = file_at(path)
    return path if file is None else _view(file)


def file_at(path: Path) -> Path | None:
    """The GGUF file that a path names, or the only one in a directory without config.json; None where there is none."""
    found = [path]
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise InputError(f"`{path}` has {len(found)} GGUF files", hint="name one of them")
    return next((f for f in found if f.suffix == ".gguf" and f.is_file()), None)


def _view(file: Path) -> Path:
    stat, release = file.stat(), importlib.metadata.version("transformers")
    known = f"{os.path.realpath(file)}\0{stat.st_size}\0{stat.st_mtime_ns}\0{__version__}\0{release}"
    view = cache_folder(GGUF) / hashlib.sha256(known.encode()).hexdigest()[:24]
    if not (view / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise UnsupportedError(
                "reading GGUF needs the package gguf", hint="install it with `pip install 'lpconv[gguf]'`"
            )
        from lpconv.checkpoint.gguf_make import make_view  # torch and transformers take seconds

        make_view(file.absolute(), view)
    return view
