"""`lpconv export onnx --cache`, and integer codes in ONNX: what the file computes and what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.export.options import ExportOptions
from lpconv.export.run import export_onnx
from lpconv.models.load import load
from lpconv.plan.options import ConvertOptions
from tests.helpers.models import tiny

_SIZES: dict[str, Any] = {
    "vocab_size": 272, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_INTEGERS = {4: onnx.TensorProto.INT4, 8: onnx.TensorProto.INT8}  # by bits


def qwen(folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES)).save_pretrained(folder)
    return folder


class Decoder:
    """An exported decoder that runs one step at a time."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        self.inputs = {i.name: i.shape for i in self.session.get_inputs()}

    def step(self, ids: np.ndarray, past: dict[str, np.ndarray], length: int) -> list[np.ndarray]:
        """Logits, keys and values of a step that ends with token number `length`."""
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(length)[None, -ids.shape[1] :],
        }
        outputs: list[np.ndarray] = self.session.run(None, {**feed, **past})
        return outputs

    def empty(self) -> dict[str, np.ndarray]:
        names = [n for n in self.inputs if n.startswith("past_key_values.")]
        return {n: np.zeros((1, self.inputs[n][1], 0, self.inputs[n][3]), np.float32) for n in names}


def documented_loop() -> Any:
    """The function `generate(folder, ids, count)` of docs/export.md."""
    page = Path(__file__).parents[2] / "docs" / "export.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    return names["generate"]


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """The tokens that transformers generates from the decoded weights in fp32."""
    model = load(folder, dtype=torch.float32)
    whole = model.generate(torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return [int(i) for i in whole[0]]


@pytest.mark.parametrize(
    ("family", "options", "form"),
    [
        ("gpt2", {"format": "e4m3fn"}, "e4m3fn × scale"),
        ("llama", {"format": "fp16"}, "fp16 × scale"),
        ("qwen3-moe", None, "fp32"),
        ("qwen2", {"format": "int4", "granularity": "group:32", "layout": "compressed-tensors"}, "int4 × scale"),
    ],
)
def test_greedy_tokens_with_a_cache(family: str, options: dict[str, Any] | None, form: str, tmp_path: Path) -> None:
    source = qwen(tmp_path / "source") if family == "qwen2" else tiny(family, tmp_path / "source", vocab_size=272)
    if options is not None:
        convert(str(source), tmp_path / "low", ConvertOptions(**options, verify="none"))
        source = tmp_path / "low"
    result = export_onnx(str(source), tmp_path / "onnx", ExportOptions(cache=True))
    assert result.check is not None
    assert result.check.max_rel_diff <= 1e-5
    assert form in {w.form for w in result.weights}
    assert [n for n in result.inputs if not n.startswith("past_key_values.")] == [
        "input_ids", "attention_mask", "position_ids",
    ]  # fmt: skip
    assert list(result.outputs)[:3] == ["logits", "present.0.key", "present.0.value"]
    ids = [5, 71, 9, 200, 13]
    assert documented_loop()(tmp_path / "onnx", ids, 32) == greedy(source, ids, 32)


def test_a_prompt_in_one_go_equals_the_prompt_step_by_step(tmp_path: Path) -> None:
    """Also beyond a sliding window: the mask hides what a shorter cache would drop."""
    config = transformers.MistralConfig(**_SIZES, sliding_window=4)
    torch.manual_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    export_onnx(str(tmp_path / "mistral"), tmp_path / "onnx", ExportOptions(cache=True))
    decoder, ids = Decoder(tmp_path / "onnx"), np.arange(3, 23)[None]
    at_once, *keys_and_values = decoder.step(ids, decoder.empty(), 20)
    past, logits = decoder.empty(), []
    for i in range(20):
        one, *present = decoder.step(ids[:, i : i + 1], past, i + 1)
        past = dict(zip(past, present, strict=True))
        logits.append(one)
    np.testing.assert_allclose(np.concatenate(logits, 1), at_once, atol=1e-6)
    for got, wanted in zip(past.values(), keys_and_values, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    model = load(tmp_path / "mistral", dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(at_once, model(torch.from_numpy(ids)).logits.numpy(), atol=1e-6)


@pytest.mark.parametrize("layout", ["lpconv", "compressed-tensors"])
@pytest.mark.parametrize(("number", "group"), [("int3", 32), ("int4", 8), ("int6", 32), ("int8", 32), ("int8", 64)])
def test_integers_stay_codes(layout: str, number: str, group: int, tmp_path: Path) -> None:
    options = ConvertOptions(format=number, granularity=f"group:{group}", layout=layout, verify="none")
    convert(str(qwen(tmp_path / "source")), tmp_path / "low", options)
    result = export_onnx(str(tmp_path / "low"), tmp_path / "onnx", ExportOptions())
    assert (result.opset, result.warnings) == (21, ())
    assert f"{number} × scale" in {w.form for w in result.weights}
    graph = onnx.load(tmp_path / "onnx" / "model.onnx").graph
    bits = 4 if number in ("int3", "int4") else 8
    codes = [i for i in graph.initializer if i.data_type == _INTEGERS[bits]]
    assert codes
    assert all(len(i.raw_data) * 8 == i.dims[0] * i.dims[1] * bits for i in codes)
    names = {i.name for i in codes}
    decoding = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in names]
    sizes = {a.i for n in decoding for a in n.attribute if a.name == "block_size"}
    assert sizes == {group}


def refused(folder: Path, out: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["export", "onnx", str(folder), "-o", str(out), *options])
    assert done.exit_code in (2, 4), done.stderr
    assert not out.exists()
    return done.stderr


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_models_that_are_not_decoders_have_no_cache(family: str, tmp_path: Path) -> None:
    error = refused(tiny(family, tmp_path / family, vocab_size=272), tmp_path / "out", "--cache")
    assert "decoder" in error
    assert "--cache" in error


def test_layers_with_another_state_are_named(tmp_path: Path) -> None:
    mamba = transformers.MambaConfig(vocab_size=272, hidden_size=32, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    assert "`MambaForCausalLM`" in refused(tmp_path / "mamba", tmp_path / "out", "--cache")
    config = transformers.Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"])
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path / "lfm2")
    assert "`conv`" in refused(tmp_path / "lfm2", tmp_path / "out", "--cache")


def test_an_opset_without_groups_is_refused(tmp_path: Path) -> None:
    options = ConvertOptions(format="int4", granularity="group:32", verify="none")
    convert(str(qwen(tmp_path / "source")), tmp_path / "low", options)
    assert "pass --opset 21" in refused(tmp_path / "low", tmp_path / "out", "--opset", "19")
