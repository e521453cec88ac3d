"""Disks that are full, names that are too long, disks that fail: words and a hint, nothing half-written."""

import errno
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.restore import restore
from lpconv.errors import InputError, ResourceError, from_system
from lpconv.progress import Silent
from lpconv.storage.place import sha256_of
from tests.convert.test_bad_place import mounted
from tests.helpers.checkpoints import Run

LONG = "x" * 300


def test_restore_into_a_full_disk_leaves_nothing(run: Run, output: Path, tmp_path: Path) -> None:
    run()
    with mounted(tmp_path / "small", "size=4k") as folder:
        with pytest.raises(ResourceError, match=r"back\.partial/model\.safetensors\.part`") as caught:
            restore(output, folder / "back", force=False, progress=Silent())
        assert caught.value.hint
        assert not list(folder.iterdir())


def test_a_page_on_a_full_disk(run: Run, output: Path, tmp_path: Path) -> None:
    run()
    with mounted(tmp_path / "small", "size=8k") as folder:
        done = CliRunner().invoke(app, ["report", str(output), "--html", str(folder / "page.html")])
        assert done.exit_code == 7, done.output
        assert not list(folder.iterdir())


@pytest.mark.parametrize("arguments", [("report", LONG), ("verify", LONG), ("restore", LONG, "-o", "y")], ids=str)
def test_names_that_are_too_long(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, list(arguments)).exit_code == 3


def test_a_page_where_none_can_be(run: Run, output: Path, tmp_path: Path) -> None:
    run()
    for place in (f"{LONG}.html", "source/config.json/page.html"):
        done = CliRunner().invoke(app, ["report", str(output), "--html", str(tmp_path / place)])
        assert done.exit_code == 7, done.output


def test_a_command_that_libraries_alone_would_kill_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.cli.handling.available_memory", lambda: 300 * 10**6)
    for command in (("finetune", "demo"), ("probe", "demo"), ("export", "onnx", "demo", "-o", "x"), ("bench", "demo")):
        done = CliRunner().invoke(app, list(command))
        assert done.exit_code == 7, (command, done.output)
        assert "MB" in done.output


def test_a_disk_that_fails_while_a_file_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "x")

    (tmp_path / "x").write_bytes(b"bytes")
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(InputError, match="Input/output error") as caught:
        sha256_of(tmp_path / "x")
    assert "disk" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 7), (errno.EROFS, 7), (errno.EIO, 3), (errno.ENAMETOOLONG, 3)]
)
def test_what_the_system_refuses_has_its_code(number: int, code: int) -> None:
    found = from_system(OSError(number, os.strerror(number), "file"))
    assert found is not None
    assert found.exit_code == code
    assert found.hint


def test_without_a_folder_for_temporary_files_it_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    found = from_system(caught.value)
    assert found is not None
    assert found.exit_code == 7
    assert "TMPDIR" in str(found.hint)


def test_an_error_without_reason_stays_a_bug() -> None:
    assert from_system(OSError("odd")) is None
    assert from_system(RuntimeError("odd")) is None


def test_what_libraries_say_of_a_full_disk_has_its_code(tmp_path: Path) -> None:
    """safetensors and torch write under a limit on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for write in (lambda p: save_file({"x": torch.ones(999)}, p), lambda p: torch.save(torch.ones(999), p)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            write(tmp_path / "file")
        except Exception as e:
            found = from_system(e)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert found is not None
        assert found.exit_code == 7
