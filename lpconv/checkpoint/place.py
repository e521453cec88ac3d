"""Files that are read by ranges, wherever their bytes are. Plain Python, no torch.

The bytes of a remote checkpoint stay where they are. A weight file of it stands here as a *pointer*: a file of the
object's size, all hole but a header that says which version of which object it stands for. So sizes, times and names
are those of any file, what knows no pointers refuses the header, and whoever opens files here reads the object.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any, Protocol

from lpconv.checkpoint.remote import RemoteFile
from lpconv.errors import InputError

__all__ = ["MIN_POINTER_BYTES", "LocalFile", "RangedFile", "is_pointer", "open_file", "write_pointer"]

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
        self.size_bytes = os.fstat(self._fd).st_size

    def read_into(self, start: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], start + done)
            except OSError as e:
                raise InputError(f"reading `{self._name}` failed: {e.strerror}", hint="check the disk") from e
            if count == 0:
                raise InputError(f"`{self._name}` became shorter while it was read", hint="is it still downloading?")
            done += count

    def close(self) -> None:
        os.close(self._fd)


def open_file(path: Path) -> RangedFile:
    """The bytes of a file, or of the object that it points to. Raises OSError where it does not open."""
    local = LocalFile(path)
    pointer = _pointer_in(local)
    if pointer is None:
        return local
    local.close()
    return RemoteFile(size_bytes=local.size_bytes, **pointer)


def is_pointer(path: Path) -> bool:
    """Whether a file stands for an object elsewhere. Raises OSError where it does not open."""
    local = LocalFile(path)
    try:
        return _pointer_in(local) is not None
    finally:
        local.close()


def write_pointer(path: Path, size_bytes: int, **pointer: str | None) -> None:
    """Make a file that stands for an object of `size_bytes`; `pointer` are the other arguments of `RemoteFile`."""
    head = _MARK + json.dumps(pointer).encode() + b"}"
    with path.open("wb") as f:
        f.write(_PREFIX.pack(len(head)) + head)
        f.truncate(size_bytes)


def _pointer_in(file: LocalFile) -> dict[str, Any] | None:
    head = memoryview(bytearray(min(_PREFIX.size + len(_MARK), file.size_bytes)))
    file.read_into(0, head)
    if bytes(head[_PREFIX.size :]) != _MARK:
        return None
    text = memoryview(bytearray(*_PREFIX.unpack(head[: _PREFIX.size])))
    file.read_into(_PREFIX.size, text)
    found: dict[str, Any] = json.loads(bytes(text))["lpconv_remote"]
    return found
