"""Outputs that cannot be where they should: something is there, the disk is full, the folder is the source."""

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import LpconvError, OutputExistsError, ResourceError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from tests.helpers.checkpoints import Run, files_of, published, refusal, shallow_demo, write_checkpoint
from tests.helpers.gguf_files import write_gguf


class TestOutput:
    def test_force_replaces_an_output_of_ours_only(self, run: Run, output: Path) -> None:
        run()
        (output / "report.json.part").touch()  # of a killed run
        (output / ".gitattributes").touch()  # of the source, or of the hub
        run(force=True, format="bf16")
        (output / "lpconv.json").unlink()
        before = files_of(output)
        with pytest.raises(OutputExistsError, match=r"output`.*--force"):
            run(force=True)
        assert files_of(output) == before

    @pytest.mark.parametrize(
        ("name", "code"),
        [("source", 8), ("source/out", 2), (".", 8), ("/", 8), ("x" * 300, 7), ("source/config.json/out", 2)],
    )
    def test_places_no_output_can_be(self, source: Path, tmp_path: Path, name: str, code: int) -> None:
        before = files_of(tmp_path)
        with pytest.raises(LpconvError) as caught:
            convert(str(source), tmp_path / name, ConvertOptions(force=True))
        assert caught.value.exit_code == code
        assert files_of(tmp_path) == before

    def test_a_source_inside_an_older_output_survives_force(self, run: Run, output: Path) -> None:
        run()
        inner = write_checkpoint(output / "source")
        with pytest.raises(OutputExistsError, match=f"inside `{output}`"):
            convert(str(inner), output, ConvertOptions(force=True))
        assert (inner / "model.safetensors").exists()

    def test_restore_does_not_replace_what_it_reads(self, run: Run, output: Path) -> None:
        run()
        with pytest.raises(OutputExistsError, match="same"):
            restore(output, output, force=True, progress=Silent())

    def test_restore_replaces_an_earlier_restore_only(self, run: Run, output: Path, tmp_path: Path) -> None:
        run()
        back = tmp_path / "back"
        restore(output, back, force=False, progress=Silent())
        first = files_of(back)
        (back / "model.safetensors").write_bytes(b"broken")
        with pytest.raises(OutputExistsError, match="exists"):
            restore(output, back, force=False, progress=Silent())
        restore(output, back, force=True, progress=Silent())
        assert files_of(back) == first
        (back / "lpconv.json").unlink()
        with pytest.raises(OutputExistsError, match=r"back`.*--force"):
            restore(output, back, force=True, progress=Silent())


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shallow")
    convert(str(shallow_demo(folder / "source")), folder / "made", ConvertOptions(format="fp16", verify="none"))
    return folder / "made"


class TestOwnSource:
    """Of every command with an output, whatever the spelling, and before anything is deleted."""

    @pytest.fixture
    def made(self, shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        return shutil.copytree(shallow, tmp_path / "made")

    @pytest.mark.parametrize(
        "command",
        ["convert", "restore", "probe", "finetune --twin none", "export onnx", "init --reinit", "advise --for infer"],
    )
    @pytest.mark.parametrize("place", ["made/sub", "./made/../made/sub"])
    def test_an_output_inside_it(self, made: Path, command: str, place: str) -> None:
        before = files_of(made)
        done = CliRunner().invoke(app, [*command.split(), "made", "-o", place])
        assert (done.exit_code, "inside" in done.stderr) == (2, True), done.stderr
        assert files_of(made) == before

    @pytest.mark.parametrize("marker", ["lpconv.json", "finetune.json"])
    def test_it_is_not_replaced(self, made: Path, marker: str) -> None:
        command = "convert"
        if marker == "finetune.json":
            command = "finetune --twin none"
            (made / marker).write_text("{}")
            with (made / "SHA256SUMS").open("a") as f:
                f.write(f"{0:064}  {marker}\n")
        before = files_of(made)
        done = CliRunner().invoke(app, [*command.split(), "made", "-o", "made/../made", "--force"])
        assert done.exit_code == 8, done.stderr
        assert files_of(made) == before

    def test_a_gguf_file_in_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        file = write_gguf(tmp_path / "gguf")
        file = file if file.is_file() else next(file.glob("*.gguf"))
        (file.parent / "lpconv.json").write_text("{}")
        (file.parent / "SHA256SUMS").write_text(f"{0:064}  {file.name}\n")
        before = files_of(file.parent)
        for model in (file.parent, file):
            with pytest.raises(OutputExistsError, match=r"same|inside"):
                convert(str(model), file.parent, ConvertOptions(format="fp16", verify="none", force=True))
        assert files_of(file.parent) == before

    @pytest.mark.parametrize("command", ["convert demo --verify none", "restore made", "export onnx made"])
    def test_force_keeps_the_files_of_others(self, made: Path, command: str) -> None:
        arguments = [*command.split(), "-o", "out", "--force"]
        for _ in range(2):
            assert CliRunner().invoke(app, arguments).exit_code == 0
        (made.parent / "out" / "notes.txt").write_text("mine")
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, "notes.txt" in done.stderr) == (8, True)
        assert (made.parent / "out" / "notes.txt").exists()


class TestFullDisk:
    """Exit code 7, nothing published, and `--resume` goes on once there is space."""

    def test_found_before_the_work(self, run: Run, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(output.parent)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        error = refusal(run, output)
        assert isinstance(error, ResourceError)
        assert error.details["free_bytes"] == 1000
        assert not output.with_name("output.partial").exists()

    @pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fsync", "rename"])
    @pytest.mark.parametrize("which", [1, 2, 3])
    def test_found_while_writing(
        self, run: Run, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, call: str, which: int
    ) -> None:
        write_checkpoint(source, [{f"layer.{i}.weight": torch.full((8, 8), float(i))} for i in range(3)])
        real, calls = getattr(os, call), itertools.count(1)

        def full(*args: Any) -> Any:
            if next(calls) >= which:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            error = refusal(run, output)
        assert isinstance(error, ResourceError)
        assert f"{output}.partial" in error.message
        assert "--resume" in str(error.hint)
        run(resume=True)
        assert load_file(output / "model-00003-of-00003.safetensors").keys() == {
            "layer.2.weight", "layer.2.weight_scale",
        }  # fmt: skip

    def test_a_small_file_system(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_checkpoint(source, {"w": torch.ones(1024, 1024)})
        options = ConvertOptions(format="fp32", verify="none", workers=1)
        with mounted(tmp_path / "small", "size=6m") as folder:
            output = folder / "output"
            with pytest.raises(ResourceError, match=r"8\.39 MB .* 6\.29 MB"):
                convert(str(source), output, options)
            (source / "big.txt").write_bytes(bytes(3 * 2**20))
            monkeypatch.setattr("lpconv.convert.run.check_disk", lambda *_: None)  # the space goes while we write
            with pytest.raises(ResourceError, match=r"big\.txt`"):
                convert(str(source), output, options)
            assert not published(output)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs; skips the test where mounting is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs rights that this user has not")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
