"""Files and folders kept from other processes by advisory locks, which end with the process whatever happens to it.

Some file systems have no locks (Lustre mounted without them, some network stores). There, nobody is told from anybody:
work goes on as if it were alone, since refusing it would name another run that does not exist.
"""

import fcntl
import os
from pathlib import Path

from lpconv.errors import OutputExistsError


def hold(descriptor: int) -> bool:
    """Whether an open file or folder is now ours alone, until it is closed."""
    return _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def wait_for(descriptor: int) -> None:
    """Wait until an open file is ours alone; it is until it is closed."""
    _lock(descriptor, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether a live process holds a file or a folder; what does not exist is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # a shared lock, so concurrent checks do not block each other
        return not _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def held_by_another(place: Path) -> OutputExistsError:
    """The refusal of a place that another run holds."""
    return OutputExistsError(f"another run is writing `{place}`", hint="wait for it, or choose another --output")


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
