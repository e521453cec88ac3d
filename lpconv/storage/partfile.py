"""Write a file once: hashed front to back while its bytes are in the cache, and either complete or absent.

Bytes go to `NAME.part`, which is renamed to NAME after `fsync`. Another thread writes them back to the disk as they
arrive, so that the final `fsync` is short, and then drops them from the page cache: otherwise an output would evict its
own source, and dropped pages are cheaper to refill than fresh ones, several times so in virtual machines that receive
memory from the host on first touch.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lpconv.errors import LpconvError, OutputExistsError, ResourceError, UnsupportedError, os_error
from lpconv.results import FileRecord

PART = ".part"  # suffix of a file that is being written
_FLUSH_BYTES = 64 * 2**20


class PartFile:
    """A file under construction below `root`: `append` in order, then `finish`, or `abandon` it.

    `size_bytes` is None if unknown. If several threads produce the bytes, each may `write` its own, and one thread
    calls `digest` on them in order.
    """

    def __init__(self, root: Path, name: str, size_bytes: int | None, flusher: ThreadPoolExecutor) -> None:
        self._name, self._size = name, size_bytes
        self._path = root / name
        self._part = self._path.with_name(self._path.name + PART)
        self._flusher, self._flushes = flusher, list[Future[None]]()
        self._hash = hashlib.sha256()
        self._hashed = self._flushed = 0
        self._fd: int | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._part.unlink(missing_ok=True)  # never followed if it is a link
            self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            if size_bytes:
                _reserve(self._fd, size_bytes)
        except OSError as e:
            self._close()
            raise write_error(e, self._part) from e

    def append(self, data: bytes | memoryview) -> None:
        """Write and hash the next bytes. Raises ResourceError if the disk is full."""
        self.write(self._hashed, data)
        self.digest(data)

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Write bytes at a position, from any thread. Raises ResourceError if the disk is full."""
        assert self._fd is not None
        view = memoryview(data).cast("B")
        with writing(self._part):
            while view:
                count = os.pwrite(self._fd, view, position)
                position += count
                view = view[count:]

    def digest(self, data: bytes | memoryview) -> None:
        """Hash the next bytes of the file, which are already written."""
        assert self._fd is not None
        self._hash.update(data)
        self._hashed += memoryview(data).nbytes
        if self._hashed - self._flushed >= _FLUSH_BYTES:
            self._flushes.append(self._flusher.submit(_write_back, self._fd, self._flushed, self._hashed))
            self._flushed = self._hashed

    def finish(self) -> FileRecord:
        """Wait until the bytes are on the disk, then rename the file to its final name."""
        assert self._fd is not None
        assert self._size in (None, self._hashed), (self._name, self._hashed, self._size)
        with writing(self._part):
            for flush in self._flushes:
                flush.result()
            os.fsync(self._fd)
            self._close()
            os.rename(self._part, self._path)
            fsync_directory(self._path.parent)
        return FileRecord(name=self._name, size_bytes=self._hashed, sha256=self._hash.hexdigest())

    def abandon(self) -> None:
        """Stop writing unless the file is finished; the part file remains, and the next run overwrites it."""
        for flush in self._flushes:
            flush.cancel() or flush.exception()
        self._close()

    def _close(self) -> None:
        """Close the file once: a second close could hit another file with the same descriptor."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _reserve(fd: int, size_bytes: int) -> None:
    """Allocate the disk space now, so that a full disk is detected before the work. Not every file system can."""
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_back(fd: int, start: int, stop: int) -> None:
    if hasattr(os, "posix_fadvise"):  # macOS has neither call, so everything is left to the final `fsync`
        os.fdatasync(fd)
        os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert a failed write inside the context, in any library, into `write_error` for `path` or a file below it."""
    try:
        yield
    except LpconvError:
        raise
    except Exception as e:
        refused = os_error(e)
        if refused is None:
            raise
        names = [Path(n) for n in (refused.filename2, refused.filename) if isinstance(n, str)]
        raise write_error(refused, next((n for n in names if n.is_relative_to(path)), path)) from e


def write_error(e: OSError, path: Path) -> LpconvError:
    """Error for a failed write: exit code 7, with a hint."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"no space left while writing `{path}`",
            hint="free some space and run again, with --resume if the command has it",
        )
    hint = "check the folder and its permissions"
    if e.errno == errno.EFBIG:
        hint = "raise the limit of the size of files (`ulimit -f`), or set --max-shard-size where it exists"
    return ResourceError(f"cannot write `{path}`: {e.strerror or e}", hint=hint)


def write_small(path: Path, content: str | bytes) -> FileRecord:
    """Write a small file at once, durably. Devices and pipes, such as /dev/stdout, are written to directly."""
    data = content.encode() if isinstance(content, str) else content
    with writing(path):
        if os.path.exists(path) and not os.path.isfile(path):
            path.write_bytes(data)
        else:
            _replace(path, data)
    return FileRecord(name=path.name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + PART)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # a link that somebody has put there is not followed
        with part.open("xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.rename(part, path)
    except BaseException:  # interrupts, too
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, before the work. Raises ResourceError, for a folder OutputExistsError."""
    check_writable(path)
    if path.is_dir():
        raise OutputExistsError(f"`{path}` is a directory", hint="pass a file in that directory")


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, existing or not, before the work. Raises ResourceError.

    A nameless file is created next to it, since permissions do not tell what a file system allows root. A full disk is
    not detected. Raises UnsupportedError for a URL.
    """
    if re.match("[a-z][a-z0-9]*:/", str(path)):  # a Path has merged the slashes
        raise UnsupportedError(f"`{path}` is not a local folder", hint="write to a local folder and copy it")
    mode = 0  # of a path that does not exist, the usual case
    with writing(path), contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode  # fails for a name too long, a link to itself, a file where a folder should be
    if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return  # a device or a pipe, which `write_small` writes to directly
    folder = path.absolute().parent
    while not os.path.exists(folder):
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        text = f"cannot write below `{folder}`: {e.strerror or e}"
        raise ResourceError(text, hint="check the folder and its permissions") from e


def fsync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
