"""Checkpoints of a run: whole ones are used, and no others."""

import errno
import os
from pathlib import Path

import pytest

from lpconv.errors import InputError, UnreadError
from lpconv.train.folder import Metrics, drop_broken, last_checkpoint, seal_checkpoint, step_of


def write(folder: Path, step: int, *, sealed: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text(f"weights {step}")
    (checkpoint / "state.json").write_text("{}")
    if sealed:
        seal_checkpoint(folder, step)
    return checkpoint


def test_the_last_whole_one_is_used(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    assert last_checkpoint(tmp_path) is None
    write(tmp_path, 9)
    whole = write(tmp_path, 10)
    write(tmp_path, 11, sealed=False)  # the run was killed while it was written
    (tmp_path / "checkpoint-x").mkdir()
    found = last_checkpoint(tmp_path)
    assert found == whole
    assert found is not None
    assert step_of(found) == 10


@pytest.mark.parametrize("damage", ["changed", "missing", "cut", "folder"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    before, last = write(tmp_path, 2), write(tmp_path, 4)
    if damage == "changed":
        (last / "weights").write_text("other")
    elif damage == "missing":
        (last / "weights").unlink()
    elif damage == "cut":
        (last / "SHA256SUMS").write_bytes((last / "SHA256SUMS").read_bytes()[:40])
    else:
        (last / "SHA256SUMS").unlink()
        (last / "SHA256SUMS").mkdir()
    assert last_checkpoint(tmp_path) == before


def test_what_is_not_whole_makes_room(tmp_path: Path) -> None:
    whole, cut = write(tmp_path, 2), write(tmp_path, 4, sealed=False)
    (cut / "scheduler.pt").mkdir()  # as a file system may leave what it lost
    (tmp_path / "checkpoint-x").mkdir()
    drop_broken(tmp_path)
    assert sorted(tmp_path.iterdir()) == [whole, tmp_path / "checkpoint-x"]
    drop_broken(tmp_path / "none")


def test_what_cannot_be_read_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path, 2)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(UnreadError):
        drop_broken(tmp_path)
    assert (checkpoint / "weights").exists()


def test_two_are_kept_whatever_the_clock_says(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        write(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-4"]


@pytest.mark.parametrize("lost", ['{"step": 1}\n', "", '{"step": 1, "loss": "x", "time_s": 1}\n', "[]\n"])
def test_rows_that_are_lost_are_not_passed_over(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lost + '{"step": 2, "loss": 1.0, "time_s": 1}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl`.* 2$"):
        Metrics(path, step=2)
