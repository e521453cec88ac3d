"""Checkpoints that somebody can mend: errors name what was done to them, and hints what to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lpconv
from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError

COMMANDS = (["inspect"], ["convert", "-o", "out"], ["export", "onnx", "-o", "out"])
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text((demo_checkpoint() / "config.json").read_text())
    return tmp_path / "model"


def refusals(model: str) -> list[Any]:
    """What `inspect`, `convert` and `load` say."""
    said = []
    for command, *more in COMMANDS[:2]:
        done = CliRunner().invoke(app, [command, model, *more])
        assert done.exit_code in (3, 5), (done.output, done.exception)
        said.append(done.stderr)
    with pytest.raises(InputError) as refused:
        lpconv.load(Path(model))
    return [*said, f"{refused.value} {refused.value.hint}"]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_pointers_of_git_lfs_are_named(name: str, folder: Path) -> None:
    pytest.importorskip("gguf")
    (folder / name).write_bytes(POINTER)
    model = f"model/{name}" if name.endswith("gguf") else "model"
    for said in refusals(model)[name.endswith("bin") :]:  # `inspect` does not open pickles
        assert "LFS" in said
        assert "`git lfs pull`" in said


def test_side_files_that_are_pointers_of_git_lfs_are_named(folder: Path) -> None:
    shutil.copytree(demo_checkpoint(), folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_bytes(POINTER)
    done = CliRunner().invoke(app, ["convert", "model", "--dry-run", "--json"])
    assert [w for w in json.loads(done.stdout)["warnings"] if "LFS" in w and "`tokenizer.json`" in w]


def test_the_hint_if_a_scheme_converts_nothing_works(folder: Path) -> None:
    """GPT-2 has no Linear modules; so the hint is to leave the scheme out."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    done = CliRunner().invoke(app, ["convert", "model", "--scheme", "FP8_DYNAMIC", "--dry-run"])
    assert done.exit_code == 4
    assert "--layout" in done.stderr
    other = CliRunner().invoke(app, ["convert", "model", "--layout", "lpconv", "-f", "e4m3fn", "--dry-run"])
    assert other.exit_code == 0


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_names_of_wrapped_models_are_refused_by_prefix(prefix: str, name: str, folder: Path) -> None:
    """As saved from what torch.compile and DistributedDataParallel return."""
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_checkpoint())
    holder = torch.nn.Module()
    holder.add_module(prefix[:-1], model)
    wrapped = torch.compile(model) if prefix == "_orig_mod." else holder
    state = {n: x.clone() for n, x in wrapped.state_dict().items()}
    if name.endswith("bin"):
        torch.save(state, folder / name)
    else:
        save_file(state, folder / name, metadata={"format": "pt"})
    for said in refusals("model")[name.endswith("bin") :]:
        assert prefix in said
        assert f"`model.{prefix}save_pretrained(DIR)`" in said


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_a_config_that_is_left_over_is_named(method: str, folder: Path) -> None:
    save_file(
        load_file(demo_checkpoint() / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    for said in refusals("model"):
        assert f"`{method}`" in said
        assert "remove quantization_config" in said
