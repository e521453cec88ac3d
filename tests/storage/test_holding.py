"""Files and folders kept from other processes, and file systems that have no locks."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lpconv.storage.staging import is_locked, try_lock


@pytest.fixture(params=["file", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir() if request.param == "folder" else place.touch()
    return place


def test_a_place_is_held_until_it_is_closed(place: Path) -> None:
    assert not is_locked(place)
    first, second = (os.open(place, os.O_RDONLY) for _ in range(2))
    assert try_lock(first)
    assert is_locked(place)
    assert not try_lock(second)
    os.close(first)
    assert not is_locked(place)
    assert try_lock(second)
    os.close(second)


def test_what_is_not_there_is_free(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "nothing")


def test_where_there_are_no_locks_nobody_else_is_suspected(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    descriptor = os.open(place, os.O_RDONLY)
    assert try_lock(descriptor)
    assert not is_locked(place)
    os.close(descriptor)
