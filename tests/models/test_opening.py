"""A model opened to run, to trace, to train and to time, in every form it can be stored in, a head or none on it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lpconv.hf
from lpconv.bench.models import find_model
from lpconv.bench.run import choose_model
from lpconv.bench.runner import CaseRunner
from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.errors import InputError, UnsupportedError
from lpconv.models.inputs import example_inputs
from lpconv.models.opening import open_to_run, open_to_trace, open_to_train
from lpconv.models.tasks import TASKS, find_task, task_of
from lpconv.plan.options import ConvertOptions

FORMS = {
    "unit": {"method": "unit", "format": "fp16"},
    "scalify": {"method": "scalify", "format": "fp16"},
    "multipoint": {"method": "multipoint", "format": "int8"},
    "collage": {"method": "collage", "format": "bf16"},
    "exact16": {"method": "collage", "format": "bf16", "residual": "exact16"},
    "compressed-tensors": {"method": "unit", "format": "e4m3fn", "layout": "compressed-tensors"},
}
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip


def bert(folder: Path, kind: str = "BertModel", *, named: bool = True) -> Path:
    """A small BERT; sentence encoders name no architecture, or the bare model."""
    torch.manual_seed(0)
    getattr(transformers, kind)(transformers.BertConfig(**SMALL)).save_pretrained(folder)
    if not named:
        change_config(folder, architectures=None)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_example_inputs_fit_a_model_with_few_positions_some_of_which_are_not_for_tokens() -> None:
    config = transformers.RobertaConfig(**SMALL | {"max_position_embeddings": 20})
    model = transformers.RobertaModel(config)
    inputs = example_inputs(model)
    assert inputs["input_ids"].shape[1] == 18
    model(**inputs)


@pytest.fixture(scope="module", params=[*FORMS, "source"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence encoder that names no architecture, in every form."""
    folder = tmp_path_factory.mktemp("forms")
    source = bert(folder / "source", named=False)
    if request.param != "source":
        options = {"verify": "none", **FORMS[request.param]}
        convert(str(source), folder / "out", ConvertOptions(**options))  # type: ignore[arg-type]  # options by name
        return folder / "out"
    return source


def test_a_model_without_a_head_opens_for_every_purpose(stored: Path) -> None:
    model = open_to_run(stored).model
    assert type(model).__name__ == "BertModel"
    with torch.inference_mode():
        wanted = model(**example_inputs(model))[0]
        traced = open_to_trace(stored).model
        assert torch.allclose(traced(**example_inputs(traced))[0], wanted, atol=1e-5)
        trained = open_to_train(TASKS["classification"], stored, seed=0, num_labels=3)
        assert trained.task is TASKS["classification"]
        assert trained.model.config.num_labels == 3
        assert set(trained.missing) == {"classifier.weight", "classifier.bias"}
        assert torch.equal(trained.model.bert(**example_inputs(model))[0], wanted)
        case, _ = choose_model(str(stored), None, {"device": "cpu", "name": "CPU"})
        timed = find_model(case).build("cpu")
        assert not timed.missing
        assert torch.allclose(timed.model(**example_inputs(model))[0], wanted, atol=1e-5)


def test_an_auto_class_opens_every_form(stored: Path) -> None:
    model = lpconv.hf.load(stored, model_class=transformers.AutoModelForMaskedLM)
    assert type(model).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize("resident", [False, True])
def test_a_checkpoint_that_lacks_weights_is_opened_only_if_asked(tmp_path: Path, resident: bool) -> None:
    """A class that the caller names may have a head that the files lack."""
    lost = "encoder.layer.1.output.dense.weight"
    source = bert(tmp_path / "source")
    kept = {n: x for n, x in load_file(source / "model.safetensors").items() if n != lost}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"1 .*`BertModel`.*`{lost}`") as refused:
        lpconv.load(source, resident=resident)
    assert "allow_missing=True" in str(refused.value.hint)
    assert lpconv.load(source, resident=resident, allow_missing=True).config.num_hidden_layers == 2


def test_a_config_without_architectures_asks_for_no_pooler(tmp_path: Path) -> None:
    """Nothing says whether the model has one; its hidden states need none."""
    source = bert(tmp_path / "source", named=False)
    kept = {n: x for n, x in load_file(source / "model.safetensors").items() if not n.startswith("pooler.")}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    found = convert(str(source), tmp_path / "out", ConvertOptions(format="fp32", verify="logits"))
    assert found.verify.logits is not None
    assert found.verify.logits.bit_equal
    assert lpconv.load(tmp_path / "out").config.num_hidden_layers == 2
    change_config(source, architectures=["BertModel"])
    with pytest.raises(InputError, match=r"2 .*`BertModel`"):
        convert(str(source), tmp_path / "out", ConvertOptions(format="fp32", force=True))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("form", ["collage", "compressed-tensors"])
def test_a_model_without_a_head_is_verified_and_probed(form: str, named: bool, tmp_path: Path) -> None:
    source, out = bert(tmp_path / "source", named=named), tmp_path / "out"
    options = [x for k, v in FORMS[form].items() for x in (f"--{k}", v)]
    for command in (
        ["convert", source, *options, "--verify", "logits", "-q", "-o", out],
        ["verify", out, "--against", source, "--level", "logits"],
        ["probe", out, "--steps", 1, "--batch-size", 1, "--seq-len", 8, "-o", tmp_path / "probe"],
        ["export", "onnx", out, "-o", tmp_path / "onnx"],
    ):
        done = CliRunner().invoke(app, [str(x) for x in command], env={"LPCONV_COMPILE": "never"})
        assert done.exit_code == 0, f"{command}\n{done.output}"


def test_what_another_library_quantised_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = bert(tmp_path / "model", "BertForMaskedLM")
    change_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="`bitsandbytes`"):
        open_to_train(TASKS["mlm"], folder, seed=0)


def test_a_task_without_a_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no seq2seq model"):
        open_to_train(TASKS["seq2seq"], bert(tmp_path / "model"), seed=0)


def test_a_bench_says_how_much_of_its_weights_is_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    folder = bert(tmp_path / "model", "BertForMaskedLM")
    case, _ = choose_model(str(folder), None, {"device": "cpu", "name": "CPU"})
    case = dataclasses.replace(case, batch=1, seq=8, compiled="off")
    assert CaseRunner(case, memory_share=1.0).weights == "checkpoint"
    change_config(folder, num_hidden_layers=3)
    assert CaseRunner(case, memory_share=1.0).weights.startswith("16 of 58 ")


@pytest.mark.parametrize(
    ("architecture", "has_labels", "task"),
    [
        ("BertForMaskedLM", False, "mlm"),
        ("BertForMaskedLM", True, "classification"),
        ("LlamaForCausalLM", False, "clm"),
        ("BartForConditionalGeneration", True, "seq2seq"),
        ("BertForSequenceClassification", False, "classification"),
    ],
)
def test_a_task_is_found_by_the_architecture(architecture: str, has_labels: bool, task: str) -> None:
    assert find_task({"architectures": [architecture]}, "auto", has_labels=has_labels).name == task
    assert task_of("BertModel").name == "none"
