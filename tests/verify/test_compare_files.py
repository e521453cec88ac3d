"""What stands beside the weights, compared: edits are named, what other tools write differently is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from lpconv.data import demo_checkpoint
from lpconv.progress import Silent
from lpconv.results import VerifyResult
from lpconv.verify.compare import compare_files
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output


def _changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _swap(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(document))


EDITS: dict[str, Callable[[Path], Any]] = {
    "config.json: `hidden_act`": lambda d: _changed(d / "config.json", hidden_act="gelu"),
    "config.json: `attention_multiplier`": lambda d: _changed(d / "config.json", attention_multiplier=2.0),
    "generation_config.json: `eos_token_id`": lambda d: _changed(d / "generation_config.json", eos_token_id=3),
    "tokenizer: `tokenizer.json.model.vocab.a`": _swap,
    "tokenizer: `padding_side`": lambda d: _changed(d / "tokenizer_config.json", padding_side="left"),
    "tokenizer: `chat_template`": lambda d: (d / "chat_template.jinja").write_text("{{ messages }}"),
}


@pytest.mark.parametrize("named", EDITS)
def test_an_edit_of_a_plain_checkpoint_is_named(named: str, tmp_path: Path) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "out")
    EDITS[named](tmp_path / "out")
    found = _verified(tmp_path / "out")
    assert not found.passed
    assert any(named in problem for problem in found.problems), found.problems


def test_what_transformers_writes_anew_is_equal(tmp_path: Path) -> None:
    transformers.AutoConfig.from_pretrained(demo_checkpoint()).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(demo_checkpoint()).save_pretrained(tmp_path)
    shutil.copy(demo_checkpoint() / "model.safetensors", tmp_path)
    found = compare_files(tmp_path, demo_checkpoint())
    assert found.different == ()
    assert found.compared == ("config.json", "tokenizer")
    assert any(name.startswith("metrics.json ") for name in found.not_compared)


def test_a_default_that_one_config_leaves_out_is_equal(tmp_path: Path) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["rms_norm_eps"], config["rope_parameters"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    assert compare_files(tmp_path / "out", demo_checkpoint()).different == ()
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    assert compare_files(tmp_path / "out", demo_checkpoint()).different


@pytest.mark.parametrize(("eps", "passed"), [(float(np.float32(1e-6)), True), (1.001e-6, False)])
def test_a_number_that_gguf_stored_in_fp32_is_equal(eps: float, passed: bool, tmp_path: Path) -> None:
    assert json.loads((demo_checkpoint() / "config.json").read_text())["rms_norm_eps"] == 1e-6
    shutil.copytree(demo_checkpoint(), tmp_path / "out")
    _changed(tmp_path / "out/config.json", rms_norm_eps=eps)
    assert verify_output(tmp_path / "out", VerifyOptions(against="demo"), progress=Silent()).passed == passed


def test_a_setting_that_opening_drops_is_reported(tmp_path: Path) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "out")
    _changed(tmp_path / "out" / "tokenizer_config.json", add_bos_token=True)
    found = compare_files(tmp_path / "out", demo_checkpoint())
    assert found.different == ()
    assert found.not_compared[0].startswith("tokenizer: tokenizer_config.json.add_bos_token ")


def test_what_was_not_compared_is_said(tmp_path: Path) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "out" / name).unlink()
    found = _verified(tmp_path / "out")
    assert found.passed
    assert found.files is not None
    assert [name.split()[0] for name in found.files.not_compared] == ["tokenizer", "README.md"]


def _verified(folder: Path) -> VerifyResult:
    return verify_output(folder, VerifyOptions(against="demo"), progress=Silent())
