"""Detect a source that changes while it is read, since the output would be neither the old nor the new one."""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lpconv.errors import InputError
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.header import MAX_HEADER_BYTES
from lpconv.storage.partfile import read_error

_END_BYTES = 2**16  # hashed of other files: a zip has its table, with checksums of all members, at the end


@dataclass(frozen=True, kw_only=True)
class Watch:
    """State of some files at one time: size, modification time, inode, and a hash of their headers."""

    directory: Path
    seen: Mapping[str, tuple[int, int, int, str]]

    def check(self) -> None:
        """Raise InputError for the first file that has changed since."""
        for name, before in self.seen.items():
            if _file_state(self.directory / name) != before:
                raise InputError(
                    f"`{self.directory / name}` changed while it was read",
                    hint="wait until nothing writes to it, and run again with --force",
                    details={"file": name},
                )


def watch(directory: Path, names: Iterable[str]) -> Watch:
    """Record the state of files, so that `Watch.check` can detect changes."""
    return Watch(directory=directory, seen={name: _file_state(directory / name) for name in names})


def watched_files(checkpoint: Checkpoint) -> list[str]:
    """The files that a conversion reads: weights, config, index, and all side files."""
    indexes = sorted(p.name for p in checkpoint.directory.glob("*.index.json"))
    return [*checkpoint.weight_files, "config.json", *indexes, *checkpoint.side_files]


def _file_state(path: Path) -> tuple[int, int, int, str]:
    try:
        with path.open("rb") as f:
            status = path.stat()
            if path.suffix == ".safetensors":
                (length,) = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))
                ends = f.read(min(length, MAX_HEADER_BYTES))
            else:
                ends = f.read(_END_BYTES)
                f.seek(max(0, status.st_size - _END_BYTES))
                ends += f.read()
    except FileNotFoundError:
        return -1, 0, 0, ""
    except OSError as e:
        raise read_error(e, path) from e
    return status.st_size, status.st_mtime_ns, status.st_ino, hashlib.sha256(ends).hexdigest()
