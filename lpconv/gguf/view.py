"""A view of a GGUF file as a checkpoint directory, and the headers of its tensors.

Every reader of checkpoints can read such a directory: it has the file's metadata as config.json and tokenizer files,
and a link to the file. The config's ``quantization_config`` holds the position of every tensor under its name in
transformers; nothing is copied. `lpconv.gguf.read` creates the view of a file once, in a cache.
"""

import hashlib
import importlib.metadata
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from lpconv.errors import InputError
from lpconv.gguf import BLOCKS, GGUF, SUFFIX, WEIGHTS, check_package
from lpconv.storage.header import Header, TensorInfo, check_name
from lpconv.storage.place import cache_folder
from lpconv.version import __version__


def is_view(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether a directory has a GGUF file, and its table in config.json: a view, or an output in this layout."""
    settings = config.get("quantization_config")
    is_named = isinstance(settings, dict) and settings.get("quant_method") == GGUF and "tensors" in settings
    return is_named and (directory / WEIGHTS).is_file()


def header_in(config: Mapping[str, Any], path: Path) -> Header:
    """The header of the file of a view, from the view's config.

    Raw blocks are U8, with the bytes of a row as columns; plain numbers that need no processing have their own dtype.
    """
    check_package("reading GGUF")
    table, tensors, num_bytes = config["quantization_config"]["tensors"], {}, path.stat().st_size
    for name, t in table.items() if isinstance(table, dict) else [("tensors", table)]:
        check_name(name, path)
        if not is_entry(t) or t["end"] > num_bytes:
            what = f"`{path.parent}`: config.json does not describe tensor `{name}` of {path.name} correctly"
            raise InputError(what, hint="download config.json again, or pass the GGUF file alone")
        size, block = BLOCKS[t["type"]]
        is_plain = size == 1 and not t["processed"] and "order" not in t
        *lead, cols = t["shape"] if is_plain else t["stored"]
        shape = (*lead, cols) if is_plain else (*lead, cols // size * block)
        tensors[name] = TensorInfo(
            name=name, dtype=t["type"] if is_plain else "U8", shape=shape, begin=t["begin"], end=t["end"]
        )
    return Header(tensors=tensors, metadata={}, data_start=0)


def is_entry(t: Any) -> TypeGuard[dict[str, Any]]:
    """Whether the entry of a tensor in config.json is complete and consistent."""
    try:
        (size, block), shape, stored, order = BLOCKS[t["type"]], t["shape"], t["stored"], t.get("order", "")
        sizes = (*shape, *stored, t["end"])
        heads = re.fullmatch(r"rotary:([1-9]\d{0,5})", order)
        fits = order in ("", "transposed") if heads is None else shape[0] % (2 * int(heads[1])) == 0
        return (
            all(type(n) is int and 0 < n < 2**63 for n in sizes) and type(t["begin"]) is int and t["begin"] >= 0
            and type(t["processed"]) is bool and type(t["name"]) is str and len(sizes) < 8 and fits
            and stored[-1] % size == 0 and math.prod(stored) == math.prod(shape)
            and t["end"] - t["begin"] == math.prod(stored) // size * block
            and (t["processed"] or stored == (shape[::-1] if order == "transposed" else shape))
        )  # fmt: skip
    except (TypeError, LookupError):
        return False


def as_directory(path: Path) -> Path:
    """The view of a GGUF file, or of the only GGUF file in a directory without config.json; other paths are unchanged.

    Raises InputError for a damaged file, UnsupportedError for unsupported types and architectures.
    """
    file = find_gguf(path)
    return path if file is None else _view(file)


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path, or the only one in a directory without config.json; None if there is none."""
    candidates = [path]
    if path.is_dir() and not (path / "config.json").exists():
        candidates = sorted(path.glob("*.gguf"))
        if len(candidates) > 1 and not re.search(r"-\d{5}-of-\d{5}\.gguf$", candidates[0].name):
            raise InputError(f"`{path}` contains {len(candidates)} GGUF files", hint="pass one of the files")
    return next((f for f in candidates if f.suffix == SUFFIX and f.is_file()), None)


def _view(file: Path) -> Path:
    stat, release = file.stat(), importlib.metadata.version("transformers")
    # The first number counts changes of what views contain.
    known = f"2\0{os.path.realpath(file)}\0{stat.st_size}\0{stat.st_mtime_ns}\0{__version__}\0{release}"
    view = cache_folder(GGUF) / hashlib.sha256(known.encode()).hexdigest()[:24]
    if not (view / "config.json").exists():
        check_package("reading GGUF")
        from lpconv.gguf.read import make_view  # imports gguf

        make_view(file.absolute(), view)
    return view
