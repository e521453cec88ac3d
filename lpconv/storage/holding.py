"""Advisory locks on files and folders, which end with the process however it ends.

Some file systems have no locks (Lustre mounted without them, some network stores). There, other runs cannot be
detected: work continues as if it were alone, since a refusal would name another run that does not exist.
"""

import fcntl
import os
from pathlib import Path

from lpconv.errors import OutputExistsError


def try_lock(descriptor: int) -> bool:
    """Try to lock an open file or folder exclusively until it is closed; returns whether that succeeded."""
    return _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def wait_for_lock(descriptor: int) -> None:
    """Wait for the exclusive lock on an open file, which is held until it is closed."""
    _lock(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether a live process has locked a file or a folder; False if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # a shared lock, so concurrent checks do not block each other
        return not _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def locked_error(place: Path) -> OutputExistsError:
    """Error for an output that another run has locked."""
    return OutputExistsError(f"another run is writing `{place}`", hint="wait for it, or choose another --output")


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
