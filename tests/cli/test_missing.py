"""Commands on checkpoints that lack weights, and on files in layouts of tools that lpconv does not read."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from lpconv.errors import UnsupportedError
from lpconv.models.load import load
from tests.helpers.checkpoints import published

DOWN, HEAD = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj"
SHORT = ["--steps", "1", "--batch-size", "1", "--seq-len", "16"]
COMMANDS = {
    "convert": ["--format", "e4m3fn"],
    "advise": ["--for", "infer", "--budget", "minutes=0.1"],
    "probe": SHORT,
    "finetune": ["--recipe", "amp-bf16", "--twin", "none", *SHORT],
    "bench": ["--format", "fp16", "--device", "cpu"],
    "export": ["onnx"],
}
State = dict[str, Tensor]


def _parts(name: str, *more: tuple[str, Tensor]) -> Callable[[State], State]:
    return lambda state: {n: x for n, x in state.items() if n != DOWN} | {f"{name}{n}": x for n, x in more}


_SCALES, _BYTES = torch.ones(128, 1), torch.ones(128, 384, dtype=torch.uint8)
# One matrix as each tool names its parts.
TOOLS = {
    "optimum-quanto": _parts(DOWN, ("._data", _BYTES), ("._scale", _SCALES)),
    "bitsandbytes": _parts(HEAD, (".weight", _BYTES), (".SCB", _SCALES)),
    "torchao": _parts(HEAD, ("._weight_qdata", _BYTES), ("._weight_scale", _SCALES)),
    "HQQ": _parts(HEAD, (".W_q", _BYTES), (".scale", _SCALES), (".zero", _SCALES)),
    "mlx": _parts(HEAD, (".weight", _BYTES.view(torch.uint32)), (".scales", _SCALES), (".biases", _SCALES.clone())),
}


def planted(folder: Path, change: Callable[[State], State]) -> Path:
    shutil.copytree(demo_checkpoint(), folder)
    state = change(load_file(folder / "model.safetensors"))
    save_file({n: x.clone() for n, x in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lpconv_(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words], env={"LPCONV_COMPILE": "never", "COLUMNS": "500"})


def without_a_matrix(state: State) -> State:
    return {n: x for n, x in state.items() if n != DOWN}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_that_lacks_a_weight_is_refused(command: str, tmp_path: Path) -> None:
    model, (first, *rest) = planted(tmp_path / "model", without_a_matrix), [command, *COMMANDS[command]]
    words = [first, *rest[:1], model, *rest[1:]] if command == "export" else [first, model, *rest]
    done = lpconv_(*words, "-q", "-o", tmp_path / "out")
    assert done.exit_code == 3
    assert re.search(rf" 1 weight .*`LlamaForCausalLM`.*`{re.escape(DOWN)}`", done.stderr)
    assert "--allow-missing" in done.stderr
    assert not published(tmp_path / "out")


def test_what_is_missing_may_be_allowed_and_is_not_compared(tmp_path: Path) -> None:
    model = planted(tmp_path / "model", without_a_matrix)
    words = ["convert", model, "--format", "e4m3fn", "--allow-missing", "-q", "-o", tmp_path / "out"]
    done = lpconv_(*words, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["verify"]["level"] == "weights"
    assert "random" in found["verify"]["logits"]["skipped"]
    assert " 1 weight " in " ".join(found["warnings"])
    assert lpconv_(*words, "--verify", "logits", "--force").exit_code == 4
    assert lpconv_("verify", tmp_path / "out", "--against", model, "-q").exit_code == 0
    advised = lpconv_("advise", model, *COMMANDS["advise"], "--allow-missing", "-q", "-o", tmp_path / "advice")
    assert advised.exit_code == 3


@pytest.mark.parametrize("how", [[], ["--strict"], ["--stats"]], ids=str)
def test_inspect_names_what_is_missing(how: list[str], tmp_path: Path) -> None:
    done = lpconv_("inspect", planted(tmp_path / "model", without_a_matrix), *how, "-q")
    assert done.exit_code == 5
    assert " 1 weight " in done.stderr


def test_inspect_says_what_it_did_not_compare(tmp_path: Path) -> None:
    model = planted(tmp_path / "model", without_a_matrix)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_bias": True}))  # which no table is for
    done = lpconv_("inspect", model, "--json")
    assert done.exit_code == 0
    assert "config.json (--strict)" in json.loads(done.stdout)["not_checked"][-1]
    assert lpconv_("inspect", model, "--strict", "-q").exit_code == 5


@pytest.mark.parametrize("tool", TOOLS)
def test_layouts_that_are_not_read_are_known_by_their_tensors(tool: str, tmp_path: Path) -> None:
    model = planted(tmp_path / "model", TOOLS[tool])
    said = f" {tool} (`{HEAD}."
    for command, (first, *rest) in ((n, words) for n, words in COMMANDS.items() if n != "export"):
        done = lpconv_(command, model, first, *rest, "-q", "-o", tmp_path / "out")
        assert (done.exit_code, said in done.stderr) == (4, True), command
    for words in (["export", "onnx", model], ["restore", model]):
        done = lpconv_(*words, "-q", "-o", tmp_path / "out")
        assert (done.exit_code, said in done.stderr) == (4, True), words
    assert lpconv_("verify", model, "--against", "demo", "-q").exit_code == 4
    with pytest.raises(UnsupportedError, match=tool):
        load(model)
    assert said in json.loads(lpconv_("inspect", model, "--json").stdout)["not_judged"]
    assert not published(tmp_path / "out")
