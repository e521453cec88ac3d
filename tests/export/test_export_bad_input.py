"""What an export refuses, in which words, and what it leaves behind."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.errors import UnsupportedError, VerificationError
from lpconv.export.rewrite import stored_weights
from lpconv.export.trace import Traceable, trace
from lpconv.export.write import check_graph, compare_with_torch
from lpconv.models.inputs import resize_inputs
from lpconv.models.load import load
from lpconv.plan.options import ConvertOptions
from lpconv.storage.checkpoint import Checkpoint
from tests.helpers.models import tiny

AXES = {"x": {0: "batch", 1: "sequence"}}


def refused(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["export", "onnx", *map(str, arguments)])
    assert done.exit_code, done.stdout
    assert "hint:" in done.stderr
    return done.exit_code, done.stderr


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny("llama", tmp_path / "llama", vocab_size=272)


@pytest.fixture
def fp8(llama: Path, tmp_path: Path) -> Path:
    convert(str(llama), tmp_path / "fp8", ConvertOptions(format="e4m3fn", verify="none"))
    return tmp_path / "fp8"


@pytest.mark.parametrize(
    ("missing", "options"),
    [("onnxscript", ["--no-validate"]), ("onnxruntime", []), ("onnx", ["--no-validate"]), ("onnx_ir", [])],
)
def test_a_missing_extra_names_the_line_that_installs_it(
    missing: str, options: list[str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    code, text = refused(llama, "-o", tmp_path / "out", *options)
    assert code == 4
    assert missing.replace("_", "-") in text
    assert "'lpconv[onnx]'" in text
    assert not (tmp_path / "out").exists()


def test_a_place_that_onnx_cannot_name_is_refused_before_the_work(llama: Path, tmp_path: Path) -> None:
    code, text = refused(llama, "-o", tmp_path / "\udcff")
    assert code == 7
    assert "UTF-8" in text
    assert list(tmp_path.iterdir()) == [llama]


def test_a_model_without_logits_is_refused(tmp_path: Path) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**small, "vocab_size": 96, "eos_token_id": 1, "bos_token_id": 0}
    vision = {**small, "image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(tmp_path / "clip")
    code, text_said = refused(tmp_path / "clip", "-o", tmp_path / "out")
    assert code == 4
    assert "CLIPModel" in text_said


@pytest.mark.parametrize(("opset", "words"), [(18, "--opset 19"), (7, "--opset 19"), (-3, "--opset 19")])
def test_an_opset_that_is_too_low_for_fp8(opset: int, words: str, fp8: Path, tmp_path: Path) -> None:
    code, text = refused(fp8, "-o", tmp_path / "out", "--opset", str(opset))
    assert code == 2
    assert words in text


def test_an_opset_that_nobody_has(llama: Path, tmp_path: Path) -> None:
    code, text = refused(llama, "-o", tmp_path / "out", "--opset", "99")
    assert (code, "99" in text) == (4, True)
    assert not list(tmp_path.glob("out*"))  # nothing is left that the next run would stumble over


def test_beyond_the_tolerance_the_file_is_kept_aside(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = refused(llama, "-o", out, "--tolerance", "0")
    assert code == 5
    assert "--tolerance" in text
    assert "out.failed" in text
    assert not out.exists()
    assert (tmp_path / "out.failed" / "model.onnx").exists()
    assert refused(llama, "-o", out, "--tolerance", "0")[0] == 5  # another one replaces it
    assert json.loads((tmp_path / "out.failed" / "lpconv.json").read_text())["error"]["code"] == 5


class Unknown(nn.Module):
    """An operator that ONNX has no word for."""

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = torch.linalg.eigvals(x @ x.transpose(-1, -2)).real
        return values


class DataDependent(nn.Module):
    """A branch that depends on values, which a graph cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


class Model(nn.Module):
    """Takes and gives what a transformers model does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), inner])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"logits": x}


@pytest.mark.parametrize(
    ("inner", "words"),
    [(Unknown(), ("aten.linalg_eig.default", "`layers.1`")), (DataDependent(), ("`layers.1`", "capture"))],
    ids=["operator", "branch"],
)
def test_what_does_not_export_is_named_with_its_module(inner: nn.Module, words: tuple[str, ...]) -> None:
    whole: Any = {"model": Model(inner).eval(), "forward": lambda model, inputs: (model(**inputs)["logits"],)}
    with pytest.raises(UnsupportedError) as caught:
        trace(Traceable(**whole, inputs={"x": torch.randn(2, 5, 4)}, axes=AXES, outputs=("logits",)), opset=18)
    assert all(w in caught.value.message for w in words), caught.value.message
    assert caught.value.hint
    assert caught.value.details["module"] == "layers.1"


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_of_nan_leave_nothing_to_compare(name: str, llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors[name][1, 2] = torch.nan
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    code, text = refused(llama, "-o", tmp_path / "out")
    assert code == 3
    assert "NaN" in text
    assert list(tmp_path.iterdir()) == [llama]


def test_a_file_that_is_no_graph_fails_its_check(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x0a\x12\x04oops")
    with pytest.raises(VerificationError):
        check_graph(path)
    with pytest.raises(VerificationError, match="run"):
        compare_with_torch(path, [({"x": torch.zeros(1)}, (torch.zeros(1),))], tolerance=1.0)


def test_outputs_that_are_there_and_inputs_that_are_not(llama: Path, fp8: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("two years of work")
    assert refused(llama, "-o", fp8)[0] == 8
    assert refused(llama, "-o", tmp_path / "mine", "--force")[0] == 8
    assert refused(llama, "-o", llama)[0] == 8
    assert refused(llama, "-o", llama / "inside")[0] == 2
    assert refused(tmp_path / "nothing", "-o", tmp_path / "out")[0] == 3
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_checkpoint_that_another_library_quantised(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    for method, expected in {"bitsandbytes": 4, "compressed-tensors": 3}.items():  # unknown; known, and no codes there
        found = {"quant_method": method, "format": "pack-quantized"}
        (llama / "config.json").write_text(json.dumps(config | {"quantization_config": found}))
        code, text = refused(llama, "-o", tmp_path / "out")
        assert code == expected
        assert method in text


def test_a_codes_file_without_its_scales_is_refused(fp8: Path, tmp_path: Path) -> None:
    data = (fp8 / "model.safetensors").read_bytes()
    (fp8 / "model.safetensors").write_bytes(data.replace(b"q_proj.weight_scale", b"q_proj.weight_scalf"))
    assert refused(fp8, "-o", tmp_path / "out")[0] in (3, 4)
    (fp8 / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert refused(fp8, "-o", tmp_path / "out")[0] == 3


@pytest.mark.parametrize(
    ("method", "fmt", "residual"),
    [
        ("unit", "fp32", None),
        ("unit", "bf16", None),
        ("scalify", "e5m2", None),
        ("unit", "e4m3fn", None),
        ("collage", "bf16", "bf16"),
        ("collage", "fp16", None),
        ("collage", "bf16", "exact16"),
        ("collage", "bf16", "int8"),
    ],
)
def test_components_add_up_to_the_weights_that_loading_gives(
    method: str, fmt: str, residual: str | None, llama: Path, tmp_path: Path
) -> None:
    options = ConvertOptions(method=method, format=fmt, residual=residual, verify="none")
    convert(str(llama), tmp_path / "out", options)
    state = load(tmp_path / "out", dtype=torch.float32).state_dict()
    weights = {w.name: w for w in stored_weights(Checkpoint.open(tmp_path / "out"))}
    assert weights.keys() == state.keys() - {"lm_head.weight"}
    for name, weight in weights.items():
        assert torch.equal(weight.value, state[name]), name
    integers = residual in ("exact16", "int8")  # bit patterns, which a graph cannot add: stored merged
    assert (weights["model.norm.weight"].form == "fp32") == (integers or method != "collage")


def test_validation_inputs_differ_from_the_traced_ones_on_every_axis() -> None:
    ids = torch.arange(26).view(2, 13)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :11]}
    other = resize_inputs(inputs)
    assert all(a != b for n in inputs for a, b in zip(inputs[n].shape, other[n].shape, strict=True))
    assert 0 < other["attention_mask"].sum() < other["attention_mask"].numel()
    assert other["attention_mask"].any(-1).all()


def test_other_commands_refuse_an_export(tmp_path: Path) -> None:
    folder = tmp_path / "onnx"
    folder.mkdir()
    (folder / "lpconv.json").write_text(json.dumps({"format_version": 1, "kind": "onnx"}))
    for command in (["verify", str(folder)], ["restore", str(folder), "-o", str(tmp_path / "x")]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code in (3, 4), done.stderr
        assert "hint:" in done.stderr
