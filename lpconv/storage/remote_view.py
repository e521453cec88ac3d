"""A cached directory for a remote checkpoint: small files are copied, weight files are pointers (`place.py`).

Such a directory can be read like any local checkpoint. It is made once for every state of the
objects at a URL (names, sizes and tags); another state gets another directory. `config.json` is written last, so a
directory that has one is complete, and an interrupted one is completed by the next caller.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from lpconv.errors import InputError, UnsupportedError
from lpconv.storage.hub import MODULE_WEIGHTS, commit_files, wanted_files
from lpconv.storage.partfile import writing
from lpconv.storage.place import MIN_POINTER_BYTES, cache_folder, write_pointer
from lpconv.storage.remote import DOWNLOAD, UNFINISHED, RemoteObject, fetch, head, hub_names, listing
from lpconv.storage.staging import MARKER

_CONFIG, _SUMS = "config.json", "SHA256SUMS"
_AT_ONCE = 8  # parallel requests
_STEP = 32 * 2**20  # bytes per request when copying a file
# Files to look for on a server without listing, if there is no SHA256SUMS written by lpconv.
_USUAL = (
    _CONFIG, "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja", "preprocessor_config.json", "processor_config.json", "hf_quant_config.json",
    "quantize_config.json", "quant_config.json", "README.md", "LICENSE",
)  # fmt: skip


def view_of(url: str, *, whole: bool) -> Path:
    """The directory that represents the checkpoint at a checked URL; with `whole`, a full copy of it.

    An existing copy is also used without `whole`. Pickles are always copied, because their reader needs local files.
    Raises InputError if nothing is found or read, ResourceError if the cache cannot be written.
    """
    objects = _objects(url)
    if _CONFIG not in {o.name for o in objects}:
        raise InputError(f"`{url}` has no config.json", hint="pass the URL of a Hugging Face checkpoint")
    return _make_view(url, objects, whole=whole, last=_CONFIG)


def copy_of_file(url: str) -> Path:
    """A copy of the file at a checked URL, made once for every state of it. Raises the errors of `view_of`."""
    folder, _, name = url.rpartition("/")
    files = _existing_objects(folder, [name])
    if not files:
        raise InputError(f"`{url}` does not exist", hint="check the URL")
    return _make_view(folder, files, whole=True, last=name) / name


def copy_of(url: str, name: str) -> Path:
    """Copy one object below a checked URL and return the path. Raises InputError if there is none."""
    source = head(url, name)
    if source is None:
        raise InputError(f"`{url}` has no {name}", hint="`lpconv inspect` lists its contents")
    _write_object(url, source, _folder_of_url(url), whole=True)
    return _folder_of_url(url) / name


def _folder_of_url(url: str) -> Path:
    return cache_folder("remote") / PurePosixPath(url.replace("://", "/").replace(":", "_"))


def _objects(url: str) -> list[RemoteObject]:
    """The objects at a URL that belong to a checkpoint."""
    scheme = urlsplit(url).scheme
    if scheme == "hf":
        objects = [RemoteObject(name=n, size_bytes=size) for n, size in sorted(commit_files(*hub_names(url)).items())]
    elif scheme in ("http", "https"):
        objects = _objects_without_listing(url)
    else:
        objects = listing(url)
    unsafe = next((o.name for o in objects if not _is_safe(o.name)), None)
    if unsafe is not None:
        raise InputError(
            f"`{url}` has an object called {unsafe!r}, which is not a valid file name", hint="rename the object"
        )
    unfinished = [o.name for o in objects if o.name.startswith(UNFINISHED)]
    if unfinished and MARKER not in {o.name for o in objects}:
        raise InputError(
            f"`{url}` is incomplete: a run is writing it, or was interrupted",
            hint="finish it by running its command with --resume",
        )
    objects = [o for o in objects if o.name not in unfinished]
    wanted = {*wanted_files(o.name for o in objects), *(o.name for o in objects if o.name.endswith(".safetensors"))}
    return [o for o in objects if o.name in wanted]


def _is_safe(name: str) -> bool:
    return name.isprintable() and not {"..", ""} & set(name.split("/")) and "\\" not in name


def _objects_without_listing(url: str) -> list[RemoteObject]:
    """Files on a server without listing: those in lpconv's SHA256SUMS, or else usual names and those in an index."""
    if (sums := head(url, _SUMS)) is not None:
        lines = bytes(fetch(url, _SUMS, sums.e_tag)).decode(errors="replace").splitlines()
        return [sums, *_existing_objects(url, [line[66:] for line in lines if _is_safe(line[66:])])]
    objects = _existing_objects(url, _USUAL)
    for index in [o for o in objects if o.name.endswith(".index.json")]:
        try:
            files = set(json.loads(bytes(fetch(url, index.name, index.e_tag)))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # reading the checkpoint will report the error
        objects += _existing_objects(url, sorted(f for f in files if isinstance(f, str) and _is_safe(f)))
    return sorted({o.name: o for o in objects}.values(), key=lambda o: o.name)


def _existing_objects(url: str, names: Iterable[str]) -> list[RemoteObject]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        objects = [o for o in pool.map(lambda name: head(url, name), names) if o is not None]
    for name in (o.name for o in objects if o.e_tag is None):
        text = f"`{url}/{name}` has neither an ETag nor a Last-Modified time, so changes could not be noticed"
        raise UnsupportedError(text, hint=DOWNLOAD)
    return objects


def _make_view(url: str, objects: Sequence[RemoteObject], *, whole: bool, last: str) -> Path:
    """The directory for these objects, made or completed if needed. It is complete once it contains the file `last`."""
    state = json.dumps([url, [astuple(o) for o in objects]])
    digest = hashlib.sha256(state.encode()).hexdigest()[:16]
    copy, view = _folder_of_url(url) / f"{digest}-copy", _folder_of_url(url) / digest
    if whole or (copy / last).exists():
        view = copy
    if not (view / last).exists():
        sizes = {o.name: (view / o.name).stat().st_size for o in objects if os.path.isfile(view / o.name)}
        rest = [o for o in objects if o.name != last and sizes.get(o.name) != o.size_bytes]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda o: _write_object(url, o, view, whole=whole), rest))
        _write_object(url, next(o for o in objects if o.name == last), view, whole=whole)
    return view


def _write_object(url: str, o: RemoteObject, view: Path, *, whole: bool) -> None:
    """Write an object's bytes, or a pointer to it, under its modification time; the file appears by a rename.

    The temporary folder is outside of the view: if a process is killed, a file left in the view would count as part of
    the checkpoint.
    """
    path = view / o.name
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=view.parent, prefix=".fetching-") as folder:
            temporary = Path(folder) / "object"
            is_read_there = o.name.endswith(".safetensors") and not MODULE_WEIGHTS.fullmatch(o.name)
            if is_read_there and not whole and o.size_bytes >= MIN_POINTER_BYTES:
                write_pointer(temporary, o.size_bytes, store=url, name=o.name, e_tag=o.e_tag)
            else:
                _copy_object(url, o, temporary)
            temporary.chmod(0o644)
            os.utime(temporary, ns=(o.modified_ns, o.modified_ns))
            os.replace(temporary, path)


def _copy_object(url: str, o: RemoteObject, path: Path) -> None:
    with path.open("wb") as f:
        for start in range(0, o.size_bytes, _STEP):
            piece: Any = fetch(url, o.name, o.e_tag, span=(start, min(start + _STEP, o.size_bytes)))
            f.write(memoryview(piece))
