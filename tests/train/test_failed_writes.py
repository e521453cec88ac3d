"""A fine-tuning whose writes fail: exit code 7, the place named, nothing that looks finished, and --resume goes on."""

import errno
import functools
import json
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.errors import InputError, ResourceError
from lpconv.storage.partfile import writing
from lpconv.train.folder import held_folder
from lpconv.train.trainer import save_sharded

Fail = Callable[[Path, pytest.MonkeyPatch], None]
pytestmark = pytest.mark.usefixtures("shallow")


def _command(out: Path, *more: str) -> list[str]:
    sizes = ["--steps", "2", "--batch-size", "2", "--seq-len", "16", "--eval-batches", "1"]
    return ["finetune", "demo", "--recipe", "unit-fp8", *sizes, "--save-every", "1", "-o", str(out), "-q", *more]


def _refuse(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, when: Callable[..., bool]
) -> None:
    """Let calls of `owner.name` for which `when` holds raise `error`."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, refusing)


def _weights(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)")
    _refuse(monkeypatch, PreTrainedModel, "save_pretrained", error, lambda *_: True)


def _rows(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))  # as a write to an open file raises it
    _refuse(monkeypatch, Path, "open", error, lambda path, *mode: mode == ("a",))


def _checkpoint(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:677] . PytorchStreamWriter failed writing file data/0")
    _refuse(monkeypatch, torch, "save", error, lambda *_: True)


def _move(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / "model.safetensors"))
    _refuse(monkeypatch, os, "replace", error, lambda source, target: target == out / "model.safetensors")


def _report(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, os, "rename", OSError(errno.EIO, "x"), lambda source, target: target == out / "report.json")


def _config(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse(monkeypatch, os, "replace", OSError(errno.EIO, "x"), lambda source, target: target == out / "config.json")


@pytest.mark.parametrize(
    ("fail", "place"),
    [
        (_weights, "runs"),
        (_rows, "metrics.jsonl"),
        (_checkpoint, "runs/run-seed0"),
        (_move, "model.safetensors"),
        (_report, "report.json"),
        (_config, ""),
    ],
)
def test_a_write_that_fails_ends_with_7_names_its_place_and_can_be_resumed(
    fail: Fail, place: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        fail(out, patch)
        done = CliRunner().invoke(app, _command(out, "--twin", "none", "--json"))
    error = json.loads(done.stdout)["error"]
    assert (done.exit_code, error["kind"]) == (7, "resources")
    assert f"`{out / place}`" in error["message"]
    assert not any((out / name).exists() for name in ("config.json", "report.json", "report.html"))
    resumed = CliRunner().invoke(app, _command(out, "--twin", "none", "--resume"))
    assert resumed.exit_code == 0, resumed.stderr
    assert sorted(p.name for p in (out / "runs").iterdir()) == ["run-seed0"]
    verified = CliRunner().invoke(app, ["verify", str(out)])
    assert verified.exit_code == 0, verified.stdout + verified.stderr


def test_a_run_that_is_stopped_in_its_twin_has_published_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        twin = out / "runs/twin-seed0/run.json.part"
        _refuse(patch, Path, "open", OSError(errno.EIO, "x"), lambda path, *_: path == twin)
        done = CliRunner().invoke(app, _command(out))
    assert done.exit_code == 7
    assert str(twin.with_name("run.json")) in done.stderr
    assert not (out / "config.json").exists()
    assert (out / "runs/published/config.json").exists()


def test_the_error_of_a_run_survives_that_its_folder_is_gone(tmp_path: Path) -> None:
    def fail() -> None:
        shutil.rmtree(tmp_path / "run")
        raise InputError("no data")

    with pytest.raises(InputError, match="data"), held_folder(tmp_path / "run", {}, resume=False, force=False):
        fail()


def test_a_sharded_checkpoint_fails_as_its_first_rank_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = CheckpointException("save", {0: (OSError(errno.EIO, "x"), traceback.StackSummary())})
    _refuse(monkeypatch, state_dict_saver, "save", failure, lambda *_: True)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ResourceError, match=f"`{tmp_path}.*: x"), writing(tmp_path):
        save_sharded(tmp_path, model, torch.optim.SGD(model.parameters()))


def test_writing_names_files_below_its_place_and_leaves_other_errors_alone(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=f"sub/x`: {os.strerror(errno.ENOENT)}"), writing(tmp_path):
        (tmp_path / "sub/x").write_text("")
    with pytest.raises(ResourceError, match=f"`{tmp_path}`: {os.strerror(errno.ENOENT)}"), writing(tmp_path):
        shutil.copyfile("/nowhere/x", tmp_path / "x")
    with pytest.raises(ResourceError, match="space"), writing(tmp_path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    with pytest.raises(InputError), writing(tmp_path):
        raise InputError("of the source")
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError("a bug")
