"""Files that are read by ranges, wherever their bytes are. Plain Python, no torch.

The bytes of a remote checkpoint stay where they are. A weight file of it stands here as a *pointer*: a file of the
object's size, all hole but a header that says which version of which object it stands for. So sizes, times and names
are those of any file, what knows no pointers refuses the header, and whoever opens files here reads the object.
"""

import errno
import json
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lpconv.errors import InputError, UnreadError
from lpconv.extras import RemoteFile

MIN_POINTER_BYTES = 2**16  # smaller objects may be shorter than what points to them
_MARK = b'{"lpconv_remote": '
_PREFIX = struct.Struct("<Q")


class RangedFile(Protocol):
    """An open file: read from any thread, close once."""

    size_bytes: int

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. Raises InputError where that fails, or the file is shorter."""

    def close(self) -> None: ...


class LocalFile:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self._name, self._fd = path.name, os.open(path, os.O_RDONLY)
        found = os.fstat(self._fd)
        self.size_bytes = found.st_size
        if stat.S_ISDIR(found.st_mode):
            os.close(self._fd)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))

    def read_into(self, start: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], start + done)
            except OSError as e:
                raise UnreadError(f"reading `{self._name}` failed: {e.strerror}", hint="check the disk") from e
            if count == 0:
                raise InputError(f"`{self._name}` became shorter while it was read", hint="is it still downloading?")
            done += count

    def close(self) -> None:
        os.close(self._fd)


def open_file(path: Path) -> RangedFile:
    """The bytes of a file, or of the object that it points to. Raises OSError where it does not open."""
    pointer = _pointer_in(path)
    return LocalFile(path) if pointer is None else RemoteFile(size_bytes=path.stat().st_size, **pointer)


def any_pointer(directory: Path, names: Iterable[str]) -> bool:
    """Whether any of these files stands for an object elsewhere. Raises OSError where one does not open."""
    return any(_pointer_in(directory / name) is not None for name in names)


def cache_folder(kind: str) -> Path:
    """Where directories are kept that stand for checkpoints of a kind."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lpconv" / kind


def write_pointer(path: Path, size_bytes: int, **pointer: str | None) -> None:
    """Make a file that stands for an object of `size_bytes`; `pointer` are the other arguments of `RemoteFile`."""
    head = _MARK + json.dumps(pointer).encode() + b"}"
    with path.open("wb") as f:
        f.write(_PREFIX.pack(len(head)) + head)
        f.truncate(size_bytes)


def _pointer_in(path: Path) -> dict[str, Any] | None:
    """What a file of our cache points to. Elsewhere nothing does: a checkpoint may not say what is to be fetched."""
    if not os.path.realpath(path).startswith(os.path.realpath(cache_folder("remote")) + os.sep):
        return None
    with path.open("rb") as f:
        head = f.read(_PREFIX.size + len(_MARK))
        if head[_PREFIX.size :] != _MARK:
            return None
        f.seek(_PREFIX.size)
        found: dict[str, Any] = json.loads(f.read(*_PREFIX.unpack(head[: _PREFIX.size])))["lpconv_remote"]
        return found
