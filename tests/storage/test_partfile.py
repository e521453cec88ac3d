"""One output file: what it holds, what its record says, and what stays when writing fails."""

import errno
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lpconv.errors import InputError, LpconvError, ResourceError
from lpconv.storage.contents import read_json
from lpconv.storage.header import read_header
from lpconv.storage.partfile import PartFile, check_file, check_writable, write_small
from lpconv.storage.place import MAX_SMALL_BYTES, sha256_of

PIECES = [bytes([i]) * 1000 for i in range(50)]
WHOLE = b"".join(PIECES)


@pytest.fixture
def flusher() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_pieces_in_order_become_the_file_and_its_hash(tmp_path: Path, flusher: ThreadPoolExecutor) -> None:
    part = PartFile(tmp_path, "folder/model", len(WHOLE), flusher)
    for piece in PIECES:
        part.append(piece)
    record = part.finish()
    assert (tmp_path / "folder/model").read_bytes() == WHOLE
    assert (record.name, record.size_bytes) == ("folder/model", len(WHOLE))
    assert record.sha256 == hashlib.sha256(WHOLE).hexdigest()


def test_threads_may_write_in_any_order_what_is_hashed_in_order(tmp_path: Path, flusher: ThreadPoolExecutor) -> None:
    part = PartFile(tmp_path, "model", len(WHOLE), flusher)
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda i: part.write(i * 1000, PIECES[i]), reversed(range(len(PIECES)))))
    for piece in PIECES:
        part.digest(piece)
    assert part.finish().sha256 == hashlib.sha256(WHOLE).hexdigest()
    assert (tmp_path / "model").read_bytes() == WHOLE


def test_before_finish_nothing_has_the_name(tmp_path: Path, flusher: ThreadPoolExecutor) -> None:
    part = PartFile(tmp_path, "model", len(WHOLE), flusher)
    part.append(WHOLE)
    part.abandon()
    assert [p.name for p in tmp_path.iterdir()] == ["model.part"]


def test_a_write_back_that_fails_is_reported_at_the_end(
    tmp_path: Path, flusher: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    part = PartFile(tmp_path, "model", 80 * 2**20, flusher)
    for _ in range(80):
        part.append(bytes(2**20))
    with pytest.raises(ResourceError, match="model"):
        part.finish()
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("place", "code"), [("x" * 300, 7), ("file/x", 7), ("loop/x", 7), ("folder", 8), ("loop", 7)])
def test_a_place_for_no_file_is_found_before_the_work(tmp_path: Path, place: str, code: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LpconvError) as caught:
        check_file(tmp_path / place)
    assert caught.value.exit_code == code
    assert caught.value.hint


def test_a_folder_where_nothing_can_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    """Nobody writes below /proc, and yet root has leave to."""
    check_writable(tmp_path / "new" / "deeper")
    assert not any(tmp_path.iterdir())
    with pytest.raises(ResourceError, match="`/proc`") as caught:
        check_writable(Path("/proc/new/deeper"))
    assert caught.value.hint


def test_a_pipe_may_be_written_to_where_no_file_can_be_made() -> None:
    """As /dev/fd/3, which a shell gives a command for `>(cat)`."""
    reader, writer = os.pipe()
    check_file(Path(f"/proc/self/fd/{writer}"))
    os.close(reader)
    os.close(writer)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As /dev/stdout: a rename would put a file in the place of a device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_small(pipe, "words")
    assert os.read(reader, 10) == b"words"
    assert pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize("read", [read_json, read_header, sha256_of])
def test_pipes_devices_and_huge_files_are_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(InputError, match="regular"):
            read(tmp_path / name)
    with (tmp_path / "huge").open("wb") as f:
        f.truncate(MAX_SMALL_BYTES + 1)
    with pytest.raises(InputError, match=str(MAX_SMALL_BYTES)):
        read_json(tmp_path / "huge")


def test_a_link_in_place_of_a_part_is_not_followed(tmp_path: Path, flusher: ThreadPoolExecutor) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("small.part", "large.part"):
        (tmp_path / name).symlink_to(victim)
    write_small(tmp_path / "small", "new")
    part = PartFile(tmp_path, "large", 3, flusher)
    part.append(b"new")
    part.finish()
    assert [(tmp_path / n).read_text() for n in ("victim", "small", "large")] == ["mine", "new", "new"]
    assert not (tmp_path / "large").is_symlink()


def test_an_interrupt_leaves_no_part_of_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: signal.default_int_handler(signal.SIGINT, None))
    with pytest.raises(KeyboardInterrupt):
        write_small(tmp_path / "small", "new")
    assert not any(tmp_path.iterdir())
