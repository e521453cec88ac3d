"""Sources that change while they are read, and outputs that a resumed command finds finished."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import InputError, OutputExistsError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.source import open_source, read_tensor
from lpconv.verify import written as written
from tests.helpers.checkpoints import Run, files_of, published, write_checkpoint


def _other_weights_at_the_same_time(source: Path) -> None:
    before = (source / "model.safetensors").stat()
    write_checkpoint(source, {"other.weight": torch.ones(6, 8)})
    os.utime(source / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))


def _renamed_over(source: Path) -> None:
    before = (source / "model.safetensors").stat()
    shutil.copy2(source / "model.safetensors", source / "copy")
    os.rename(source / "copy", source / "model.safetensors")
    assert (source / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


CHANGES: dict[str, Callable[[Path], object]] = {
    "one byte": lambda s: (s / "model.safetensors").write_bytes((s / "model.safetensors").read_bytes()[:-1] + b"x"),
    "config": lambda s: (s / "config.json").write_text('{"x": 1}'),
    "tokenizer": lambda s: (s / "tokenizer.json").write_text("[1]"),
    "another header at the same time": _other_weights_at_the_same_time,
    "the same bytes in another file": _renamed_over,
    "gone": lambda s: (s / "model.safetensors").unlink(),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "source")
    (folder / "tokenizer.json").write_text("[]")
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_during_the_run_publishes_nothing(
    run: Run, source: Path, output: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = written.verify_written

    def changing(*args: object) -> object:
        result = real(*args)  # type: ignore[arg-type]
        CHANGES[change](source)
        return result

    monkeypatch.setattr(written, "verify_written", changing)
    with pytest.raises(InputError, match="changed") as caught:
        run()
    assert "--force" in str(caught.value.hint)
    assert not published(output)


def test_a_pickle_that_is_cut_while_it_is_mapped(tmp_path: Path) -> None:
    source = tmp_path / "bin"
    source.mkdir()
    (source / "config.json").write_text("{}")
    torch.save({"w.weight": torch.ones(512, 512)}, source / "pytorch_model.bin")
    opened = open_source(Checkpoint.open(source))
    os.truncate(source / "pytorch_model.bin", 1000)  # reading on would end the process with SIGBUS
    with pytest.raises(InputError, match=r"`pytorch_model\.bin`.*shorter"):
        read_tensor(opened, "w.weight")


def test_restore_watches_what_it_reads(run: Run, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(method="collage")

    class Changing(Silent):
        def advance(self, amount: int, figures: str = "") -> None:
            os.utime(output / "collage" / "residual.safetensors")

    with pytest.raises(InputError, match="changed"):
        restore(output, tmp_path / "back", force=False, progress=Changing())
    assert not published(tmp_path / "back")


class TestFinished:
    def test_the_same_command_says_complete(self, run: Run, output: Path) -> None:
        first, before = run(), files_of(output, without=set())
        again = run(resume=True)
        assert dataclasses.replace(again, command=None) == dataclasses.replace(first, command=None)
        assert files_of(output, without=set()) == before

    @pytest.mark.parametrize(
        ("options", "says"),
        [({"format": "bf16"}, "options"), ({"verify": "logits"}, "verification"), ({"gates": ("sqnr>=1",)}, "gates")],
        ids=str,
    )
    def test_another_command(self, run: Run, options: dict[str, object], says: str) -> None:
        run()
        with pytest.raises(OutputExistsError, match=says):
            run(resume=True, **options)

    def test_a_source_that_is_younger(self, run: Run, source: Path) -> None:
        run()
        os.utime(source / "model.safetensors")
        with pytest.raises(OutputExistsError, match="files"):
            run(resume=True)

    def test_an_output_that_was_damaged(self, run: Run, output: Path) -> None:
        run()
        (output / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(OutputExistsError, match=r"`model.safetensors`.*SHA256SUMS"):
            run(resume=True)

    def test_another_source(self, run: Run, output: Path, tmp_path: Path) -> None:
        run()
        other = write_checkpoint(tmp_path / "other")
        with pytest.raises(OutputExistsError, match="source"):
            convert(str(other), output, ConvertOptions(resume=True, verify="weights"))
