"""`lpconv export onnx`: families and formats in ONNX Runtime, and what the file holds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoTokenizer

import lpconv.hf
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import VerificationError
from lpconv.export.options import ExportOptions
from lpconv.export.run import export_onnx
from lpconv.export.trace import running
from lpconv.export.write import compare_with_torch
from lpconv.plan.options import ConvertOptions
from lpconv.results.checkpoint import ExportResult
from tests.helpers.models import tiny

# family, method, format → opset, ONNX types of the matrices, forms in the record
CASES = {
    ("bert", "unit", "fp32"): (18, {onnx.TensorProto.FLOAT}, {"fp32 × scale", "fp32"}),
    ("gpt2", "collage", "bf16"): (18, {onnx.TensorProto.BFLOAT16}, {"bf16 + bf16"}),
    ("llama", "unit", "e4m3fn"): (
        19, {onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT16}, {"e4m3fn × scale", "fp16 × scale", "fp32"},
    ),
    ("t5", "scalify", "fp16"): (18, {onnx.TensorProto.FLOAT16}, {"fp16 × scale", "fp32"}),
}  # fmt: skip


class Exported:
    """A converted model, its export, and a session that runs it."""

    def __init__(self, key: tuple[str, str, str], folder: Path) -> None:
        family, method, fmt = key
        convert(
            str(tiny(family, folder / "source", vocab_size=272)),
            folder / "low",
            ConvertOptions(method=method, format=fmt, verify="none"),
        )
        self.converted, self.directory = folder / "low", folder / "onnx"
        options = ExportOptions(external_data=family == "gpt2")
        self.result: ExportResult = export_onnx(str(self.converted), self.directory, options)
        self.proto = onnx.load(self.directory / "model.onnx")
        self.session = onnxruntime.InferenceSession(str(self.directory / "model.onnx"))

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.from_numpy(self.session.run(None, {k: v.numpy() for k, v in inputs.items()})[0])


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, Any]:
    if request.param[0] == "t5" and Version(torch.__version__) < Version("2.12"):
        pytest.skip("torch 2.11 cannot translate T5's attention")
    return Exported(request.param, tmp_path_factory.mktemp(request.param[0])), CASES[request.param]


def test_a_family_in_its_format(exported: tuple[Exported, Any]) -> None:
    done, (opset, types, forms) = exported
    assert done.result.check is not None
    assert done.result.check.max_rel_diff <= 1e-5
    assert not done.result.warnings
    assert done.result.opset == opset
    found = {f.form for f in done.result.weights}
    assert found - {"fp16"} == forms  # "fp16" alone where a scale comes out as 1
    matrices = {i.name: i.data_type for i in done.proto.graph.initializer if len(i.dims) >= 2 and "mask" not in i.name}
    learned = {n: t for n, t in matrices.items() if n.endswith(("weight", "residual"))}
    assert set(learned.values()) == types

    model = lpconv.hf.load(done.converted, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    inputs = {}
    for name, axes in done.result.inputs.items():
        assert axes[0] == "batch"
        shape = (5, 9 if axes[1] == "sequence" else 4)  # sizes that neither tracing nor validation used
        high = 272 if name.endswith("input_ids") else 2
        inputs[name] = torch.randint(high, shape, generator=generator)
    if "attention_mask" in inputs:
        inputs["attention_mask"][:, :5] = 1
    with torch.inference_mode():
        wanted = model(**inputs).logits
    got = done.run(inputs)
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_file_says_where_it_comes_from_and_names_no_path(exported: tuple[Exported, Any]) -> None:
    done, _ = exported
    facts = {p.key: p.value for p in done.proto.metadata_props}
    assert facts["lpconv.method"] == done.result.method
    assert facts["lpconv.version"] == lpconv.__version__
    assert json.loads(facts["lpconv.source_sha256"]) == {f.name: f.sha256 for f in done.result.source.files}
    for path in done.directory.iterdir():
        assert str(done.directory.parent).encode() not in path.read_bytes(), path.name
        assert b"site-packages" not in path.read_bytes(), path.name


def test_the_config_is_that_of_the_model_that_was_converted(exported: tuple[Exported, Any]) -> None:
    done, _ = exported
    source = done.converted.with_name("source")
    assert json.loads((done.directory / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_weights_that_are_tied_or_large_lie_once_and_where_they_should(exported: tuple[Exported, Any]) -> None:
    done, _ = exported
    names = {f.name for f in done.result.files}
    assert ("model.onnx.data" in names) == (done.result.architecture == "GPT2LMHeadModel")
    once = 2 if done.result.method == "collage" else 1  # codes, and the residual of a pair
    vocabulary = [i for i in done.proto.graph.initializer if list(i.dims) == [272, 32]]
    assert len(vocabulary) == once


def test_a_model_with_experts_runs_and_names_the_weights_that_stay_fp32(tmp_path: Path) -> None:
    source = tiny("qwen3-moe", tmp_path / "source", vocab_size=272)
    convert(str(source), tmp_path / "low", ConvertOptions(format="fp16", verify="none"))
    result = export_onnx(str(tmp_path / "low"), tmp_path / "onnx", ExportOptions())
    assert result.check is not None
    assert result.check.max_rel_diff < 1e-5
    (warning,) = result.warnings
    assert "`model.layers.0.mlp.experts.gate_up_proj`" in warning


def test_a_plain_half_precision_checkpoint_keeps_its_dtype_and_tokenizer(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny("llama", tmp_path / "fp32", vocab_size=272), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    tokenizer.save_pretrained(tmp_path / "plain")
    result = export_onnx(str(tmp_path / "plain"), tmp_path / "out", ExportOptions(opset=21))
    assert (result.method, result.opset) == (None, 21)
    assert [f.form for f in result.weights] == ["bf16"]
    (weights,) = result.weights
    num_parameters = sum(p.numel() for p in model.parameters())
    assert 0.99 * 2 * num_parameters < weights.size_bytes <= 2 * num_parameters  # equal norms are stored once
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("To be, or not", return_tensors="np")
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    (logits,) = session.run(None, {k: ids[k].astype(np.int64) for k in result.inputs})
    assert logits.shape == (1, ids["input_ids"].shape[1], model.config.vocab_size)


@pytest.mark.parametrize("layout", ["lpconv", "compressed-tensors"])
def test_fp8_with_a_scale_for_each_row_stays_fp8(tmp_path: Path, layout: str) -> None:
    options = ConvertOptions(format="e4m3fn", granularity="row", layout=layout, verify="none")
    convert(str(tiny("llama", tmp_path / "source", vocab_size=272)), tmp_path / "low", options)
    result = export_onnx(str(tmp_path / "low"), tmp_path / "onnx", ExportOptions())
    assert result.check is not None
    assert result.check.max_rel_diff <= 1e-5
    assert not result.warnings
    assert "e4m3fn × scale" in {f.form for f in result.weights}
    graph = onnx.load(tmp_path / "onnx" / "model.onnx").graph
    sizes = {i.name: list(i.dims) for i in graph.initializer}
    decoding = [n for n in graph.node if n.op_type == "DequantizeLinear"]
    assert decoding
    assert all(sizes[n.input[1]] == sizes[n.input[0]][:1] for n in decoding)
    assert all([a.i for a in n.attribute if a.name == "axis"] == [0] for n in decoding)


@pytest.mark.parametrize(
    "how",
    [{"format": "e4m3fn", "granularity": "mx"}, {"scheme": "MLX_MXFP4"}, {"scheme": "GGUF_Q8_0"}, {"budget_bits": 4.0}],
    ids=str,
)
def test_codes_that_no_operator_decodes_come_in_fp32_and_that_is_said(tmp_path: Path, how: dict[str, Any]) -> None:
    convert(
        str(tiny("llama", tmp_path / "source", vocab_size=272)), tmp_path / "low", ConvertOptions(**how, verify="none")
    )
    (warning,) = export_onnx(str(tmp_path / "low"), tmp_path / "onnx", ExportOptions()).warnings
    assert "in fp32, because" in warning


def test_nothing_but_the_error_is_printed_if_the_runtime_fails(tmp_path: Path, capfd: Any) -> None:
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n"]) for n in "xy")
    index = onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [9])
    gather = onnx.helper.make_node("Gather", ["x", "i"], ["y"])
    graph = onnx.helper.make_graph([gather], "g", [x], [y], [index])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8), tmp_path / "g"
    )
    with running():
        transformers.utils.logging.get_logger("transformers.models").warning("falls back")
        inputs = {"x": torch.zeros(3)}
    with pytest.raises(VerificationError, match="bounds"):
        compare_with_torch(tmp_path / "g", [(inputs, (torch.zeros(1),))], tolerance=0.0)
    assert capfd.readouterr() == ("", "")
