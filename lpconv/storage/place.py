"""Files that are read whole, hashed or read by byte ranges, local or remote. Plain Python, no torch.

The bytes of a remote checkpoint stay remote. Each of its weight files is represented by a *pointer*: a sparse file of
the object's size with a header that names the object and its version. So sizes, times and names are those of any file,
programs that do not know pointers refuse the header, and files opened here read the object.
"""

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from lpconv.errors import InputError, UnreadError
from lpconv.storage.packed import PACKED_HEAD, PackedFile
from lpconv.storage.remote import RemoteFile, shorter_error

MIN_POINTER_BYTES = 2**16  # smaller objects may be shorter than their pointer
MAX_SMALL_BYTES = 256 * 2**20  # of JSON and other files that are read whole
_READ_BYTES = 4 * 2**20
_MARK = b'{"lpconv_remote": '
_PREFIX = struct.Struct("<Q")


class LocalFile:
    """An open file on this machine: read from any thread, close once."""

    def __init__(self, path: Path) -> None:
        self._name, self._fd = path.name, open_regular(path, os.O_RDONLY)
        self.size_bytes = os.fstat(self._fd).st_size

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. Raises InputError if that fails, or if the file is shorter."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], start + done)
            except OSError as e:
                raise UnreadError(f"reading `{self._name}` failed: {e.strerror}", hint="check the disk") from e
            if count == 0:
                raise shorter_error(self._name)
            done += count

    def close(self) -> None:
        os.close(self._fd)


def open_regular(path: str | Path, flags: int) -> int:
    """Descriptor of a regular file, for `open(opener=...)`. Raises IsADirectoryError for pipes and devices."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "not a regular file"
        raise IsADirectoryError(errno.EISDIR, what, str(path))
    return descriptor


OpenFile: TypeAlias = LocalFile | RemoteFile | PackedFile


def open_file(path: Path, *, stored: bool = False) -> OpenFile:
    """Open a file, the remote object that it points to, or unless asked for as `stored`, the original of a packed one.

    Raises OSError if that fails, and InputError for a damaged packed file.
    """
    if (pointer := _pointer_in(path)) is not None:
        return RemoteFile(size_bytes=path.stat().st_size, **pointer)
    file, start = LocalFile(path), bytearray(len(PACKED_HEAD))
    if not stored and file.size_bytes > len(start):
        file.read_into(0, memoryview(start))
    try:
        return PackedFile(file, path) if start == PACKED_HEAD else file
    except BaseException:
        file.close()
        raise


def read_small(path: Path) -> bytes:
    """The contents of a regular file. Raises InputError for others and above 256 MiB, UnreadError if the disk fails."""
    with reading(path), closing(open_file(path)) as f:
        if f.size_bytes > MAX_SMALL_BYTES:
            raise InputError(
                f"`{path}` has {f.size_bytes} bytes; lpconv reads such files up to {MAX_SMALL_BYTES} bytes",
                hint="download the file again",
            )
        content = bytearray(f.size_bytes)
        f.read_into(0, memoryview(content))
    return bytes(content)


def sha256_of(path: Path, *, stored: bool = True) -> str:
    """SHA-256 of a file in hexadecimal; unless `stored`, of the original of a packed one."""
    return hash_of(path, hashlib.sha256(), stored=stored)


def hash_of(path: Path, digest: "hashlib._Hash", *, stored: bool = True) -> str:
    """Update `digest` with the bytes of a file and return it in hexadecimal. Raises InputError if a read fails."""
    with reading(path), closing(open_file(path, stored=stored)) as f:
        block = memoryview(bytearray(_READ_BYTES))
        for start in range(0, f.size_bytes, _READ_BYTES):
            read = block[: min(_READ_BYTES, f.size_bytes - start)]
            f.read_into(start, read)
            digest.update(read)
    return digest.hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert a failed read of `path` inside the context into an InputError, exit code 3, with a hint."""
    try:
        yield
    except OSError as e:
        advice = "check the path and its permissions"
        if e.errno == errno.EIO:
            advice = "check the disk, and download the file again"
        is_no_file = isinstance(e, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
        kind = InputError if is_no_file else UnreadError  # the latter is the disk's fault
        raise kind(f"cannot read `{path}`: {e.strerror or e}", hint=advice) from e


def any_indirect(directory: Path, names: Iterable[str]) -> bool:
    """Whether any of these files is packed, or points to a remote object. Raises the errors of `open_file`."""
    for name in names:
        with closing(open_file(directory / name)) as f:
            if not isinstance(f, LocalFile):
                return True
    return False


def cache_folder(kind: str) -> Path:
    """The cache folder of views of a kind of checkpoint."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lpconv" / kind


def write_pointer(path: Path, size_bytes: int, **pointer: str | None) -> None:
    """Write a pointer to an object of `size_bytes`; `pointer` are the other arguments of `RemoteFile`."""
    head = _MARK + json.dumps(pointer).encode() + b"}"
    with path.open("wb") as f:
        f.write(_PREFIX.pack(len(head)) + head)
        f.truncate(size_bytes)


def _pointer_in(path: Path) -> dict[str, Any] | None:
    """The pointer in a file of our cache, or None; a checkpoint's own files must not cause requests."""
    if not os.path.realpath(path).startswith(os.path.realpath(cache_folder("remote")) + os.sep):
        return None
    with path.open("rb") as f:
        head = f.read(_PREFIX.size + len(_MARK))
        if head[_PREFIX.size :] != _MARK:
            return None
        f.seek(_PREFIX.size)
        pointer: dict[str, Any] = json.loads(f.read(*_PREFIX.unpack(head[: _PREFIX.size])))["lpconv_remote"]
        return pointer
