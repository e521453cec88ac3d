"""Recovering what rounding lost: codes are trained, everything else keeps its bits, and the output is verified."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.forms.tiles import Tiles
from lpconv.layouts.reader import StoredTensors
from lpconv.models.coded import CodedTensor
from lpconv.models.load import load
from lpconv.plan.options import ConvertOptions, FormatRule
from lpconv.progress import Silent
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import read_json
from lpconv.train.options import FinetuneOptions, check_options
from lpconv.train.recipes import arithmetic
from lpconv.train.recover import Distillation, Grid, TrainedScales
from lpconv.train.recoverable import check_recoverable
from lpconv.train.run import finetune
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import converted_demo
from tests.helpers.gguf_files import demo_with_merges
from tests.helpers.models import tiny

COMPRESSED: dict[str, Any] = {"layout": "compressed-tensors"}
FORMS: dict[str, dict[str, Any]] = {
    "int4 groups": {"format": "int4", "granularity": "group:32"},
    "int3 rows": {"format": "int3", "granularity": "row", **COMPRESSED},
    "int8 groups": {"format": "int8", "granularity": "group:128", **COMPRESSED},
    "W4A16": {
        "scheme": "W4A16", "rounding": "gptq", "calibrate": "demo", "calibration_tokens": 512, "scale": "search"
    },
    "NVFP4": {"scheme": "NVFP4A16"},
    "MXFP4": {"format": "e2m1", "granularity": "mx", **COMPRESSED},
    "fp8 rows": {"format": "e4m3fn", "granularity": "row", **COMPRESSED},
    "fp8 blocks": {"format": "e4m3fn", "granularity": "128x128"},
    "fp8 tiles": {"format": "e4m3fn", "granularity": "128x128", "scale": "exact"},
    "int4 for MLX": {"format": "int4", "granularity": "group:32", "layout": "mlx"},
    "fp8 with one scale": {"format": "e4m3fn"},
    "int4 partly": {"format": "int4", "granularity": "group:32", "exclude": ("*.1.mlp.*",)},
}  # fmt: skip


# Those whose scales are fine enough to be trained.
SCALES = {"int4 groups", "int3 rows", "int8 groups", "W4A16", "fp8 tiles", "int4 for MLX", "int4 partly"}

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture(scope="module")
def outputs(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return converted_demo(tmp_path_factory.mktemp("forms"), FORMS)


def _options(**more: Any) -> FinetuneOptions:
    small: dict[str, Any] = {"steps": 2, "batch_size": 2, "seq_len": 16, "eval_batches": 2}
    return FinetuneOptions(arithmetic=arithmetic(recover=True, precision="fp32"), **(small | more))


def _stored(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:  # type: ignore[no-untyped-call]
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("form", FORMS)
def test_only_scales_or_codes_change_and_the_output_is_verified(
    outputs: dict[str, Path], form: str, tmp_path: Path
) -> None:
    start, out = outputs[form], tmp_path / "out"
    finetune(str(start), out, _options(lr=0.4, warmup=0.0))

    with StoredTensors.open(start) as reader:
        coded = {name: f for name, f in reader.forms.items() if f.format is not None and f.format.storage_bits <= 8}
    wanted = {c.name for f in coded.values() for c in (f.side if form in SCALES else f.data)}
    before, after = _stored(start), _stored(out)
    changed = {n for n, x in after.items() if not torch.equal(x.view(torch.uint8), before[n].view(torch.uint8))}
    assert list(after) == list(before)
    assert changed
    assert changed <= wanted  # norms and everything else keep their bits
    assert read_json(out / "config.json") == read_json(start / "config.json")
    assert verify_output(out, VerifyOptions(against="demo", level="weights"), progress=Silent()).passed


@pytest.mark.parametrize("form", ["MXFP4", "int4 groups"])
def test_divergence_falls_and_is_reported(outputs: dict[str, Path], form: str, tmp_path: Path) -> None:
    result = finetune(str(outputs[form]), tmp_path / "out", _options(steps=50, batch_size=8, seq_len=128))
    held_out = {h.metric: h for h in result.held_out}
    (run,) = result.runs
    assert held_out["eval_loss"].after < 0.9 * held_out["eval_loss"].before
    published = {s.name: s.values[-1] for s in run.evaluations}["eval_loss_published"]
    assert math.isclose(published, held_out["eval_loss"].after, rel_tol=1e-4)  # the run computed in fp32, too
    assert 0.5 < held_out["eval_accuracy"].after <= 1
    assert (result.source, result.twin, result.recipe) == ("demo", None, "recover fp32")
    halves = _options(steps=1, batch_size=4, grad_accum=2, seq_len=128)
    finetune(str(outputs[form]), tmp_path / "halves", halves)
    lines = [x for n in ("out", "halves") for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()]
    whole, parts = (x for x in map(json.loads, lines) if x["step"] == 1 and "grad_norm" in x)
    assert math.isclose(whole["loss"], parts["loss"], rel_tol=1e-4)
    assert math.isclose(whole["grad_norm"], parts["grad_norm"], rel_tol=1e-3)


@pytest.mark.parametrize(("form", "is_done"), [("int4 groups", False), ("int4 groups", True), ("MXFP4", False)])
def test_a_resumed_run_publishes_the_same_bytes(
    outputs: dict[str, Path], form: str, is_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, options = str(outputs[form]), _options(steps=6, lr=0.2, save_every=3)
    finetune(start, tmp_path / "whole", options)
    with monkeypatch.context() as patch:
        patch.setattr("lpconv.train.study.publish_model", _fail)
        with pytest.raises(KeyboardInterrupt):
            finetune(start, tmp_path / "cut", options)
    folder = tmp_path / "cut" / "runs" / "run-seed0"
    if not is_done:
        shutil.rmtree(folder / "checkpoint-6")
    finetune(start, tmp_path / "cut", replace(options, resume=True))
    whole, resumed = (tmp_path / n / "model.safetensors" for n in ("whole", "cut"))
    assert whole.read_bytes() == resumed.read_bytes()


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "form", [{"format": "int4", "granularity": "group:32"}, {"format": "e2m1", "granularity": "mx"}]
)
def test_groups_of_zeros_stay_zero(form: dict[str, str], tmp_path: Path) -> None:
    """Their scale is arbitrary, so one code more would be any number."""
    source, name = shutil.copytree(demo_checkpoint(), tmp_path / "source"), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(source / "model.safetensors")
    tensors[name][:, :32] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(str(source), tmp_path / "coded", ConvertOptions(verify="none", **form))
    finetune(str(tmp_path / "coded"), tmp_path / "out", _options(lr=0.8, warmup=0.0, source=str(source)))
    with StoredTensors.open(tmp_path / "coded") as before, StoredTensors.open(tmp_path / "out") as after:
        assert not after.tensor(name)[:, :32].any()
        assert not torch.equal(after.tensor(name), before.tensor(name))


@pytest.mark.parametrize("form", sorted(SCALES - {"int4 partly"}))
def test_gradients_of_scales_are_those_of_the_numbers_that_share_them(outputs: dict[str, Path], form: str) -> None:
    """∂L/∂log s for L = Σ r·s·c with random r, by a difference quotient of the decoded numbers."""
    name = "model.layers.0.self_attn.k_proj.weight"
    opened = load(Checkpoint.open(outputs[form]), resident=True, dtype=torch.float32)
    tensor = opened.get_parameter(name)
    assert isinstance(tensor, CodedTensor)
    (piece,) = tensor.pieces
    halves = piece.part(0, len(piece) // 2), piece.part(len(piece) // 2, len(piece))  # a scale may be that of both
    tiles = piece.form
    assert isinstance(tiles, Tiles)
    scales = TrainedScales(tiles, piece.parts[tiles.scales.name].float())
    grid, values = Grid(pieces=halves).with_scales({name: scales}), tensor.decode()
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    grid.add_gradients(weights, values, {name: scales})
    assert scales.log.grad is not None

    for index in {0, scales.log.numel() // 2, scales.log.numel() - 1}:
        sums = []
        for change in (-0.5, 0.5):
            with torch.no_grad():
                scales.log.zero_().view(-1)[index] = change
            scales.update_()
            changed = torch.empty(values.numel())
            scales.use(piece).decode_to(changed)
            sums.append(float((changed.view_as(values).double() * weights).sum()))
        quotient = (sums[1] - sums[0]) / (2 * math.sinh(0.5))
        assert math.isclose(float(scales.log.grad.view(-1)[index]), quotient, rel_tol=1e-4, abs_tol=1e-6)


def test_a_recovered_output_is_recovered_again(outputs: dict[str, Path], tmp_path: Path) -> None:
    finetune(str(outputs["NVFP4"]), tmp_path / "one", _options(lr=0.4, warmup=0.0))
    finetune(str(tmp_path / "one"), tmp_path / "two", _options(lr=0.4, warmup=0.0, seed=1))
    assert verify_output(tmp_path / "two", VerifyOptions(against="demo", level="weights"), progress=Silent()).passed


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_a_grid_are_divided_and_rounded_to_themselves(outputs: dict[str, Path], form: str) -> None:
    with StoredTensors.open(outputs[form]) as reader:
        name = "model.layers.1.self_attn.q_proj.weight"
        tensor = CodedTensor.from_form(reader.forms[name], reader.read_components(name))
    grid, values = Grid(pieces=tensor.pieces), tensor.decode()
    latents = grid.divide_(values.clone())
    assert float(latents.abs().max()) <= 448  # codes, without their scales
    assert torch.equal(grid.round_(latents * 1.002), values)


@pytest.mark.parametrize("form", ["int4 groups", "MXFP4"])
def test_a_grid_follows_its_parameter_to_another_device(outputs: dict[str, Path], form: str) -> None:
    with StoredTensors.open(outputs[form]) as reader:
        name = "model.layers.1.self_attn.q_proj.weight"
        tensor = CodedTensor.from_form(reader.forms[name], reader.read_components(name))
    values = torch.empty(tensor.shape, device="meta")
    grid = Grid(pieces=tensor.pieces).to(values.device)
    for numbers, factor, _ in grid.parts(values):
        assert isinstance(factor, Tensor)
        assert factor.device == numbers.device == values.device


def test_the_loss_is_the_divergence_from_the_teacher() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(7, 300)
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, input_ids: Tensor) -> Any:
            from transformers.modeling_outputs import CausalLMOutput

            return CausalLMOutput(logits=self.drop(self.table(input_ids)))

    torch.manual_seed(0)
    teacher, model = Model(), Model()
    distillation = Distillation(teacher)
    distillation.attach(model)
    ids = torch.randint(7, (3, 200))
    model.train()
    output = model(input_ids=ids, labels=ids)
    (got,) = torch.autograd.grad(output.loss, [model.table.weight])

    log_q, log_p = (m.table(ids).log_softmax(-1).flatten(0, 1) for m in (model, teacher))
    wanted = functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    (reference,) = torch.autograd.grad(wanted, [model.table.weight])
    torch.testing.assert_close(output.loss, wanted)
    torch.testing.assert_close(got, reference)
    assert distillation.agreement == float((log_q.argmax(-1) == log_p.argmax(-1)).float().mean())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"format": "fp16"}, "stores unit in fp16"),
    "collage": ({"method": "collage"}, "stores collage in bf16"),
    "multipoint": ({"method": "multipoint", "format": "int8"}, "stores multipoint"),
    "bits": ({"budget_bits": 4.0, "rules": (FormatRule(pattern="*o_proj*", format="e4m3fn"),)}, "entropy-coded"),
    "input scales": (
        {"format": "e4m3fn", "layout": "compressed-tensors", "calibrate": "demo"},
        "stores input scales",
    ),
    "gguf": ({"layout": "gguf", "format": "int8", "granularity": "group:32"}, "layout gguf"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_outputs_without_codes_to_train_are_refused(case: str, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    convert(
        str(demo_with_merges(tmp_path / "source")) if case == "gguf" else "demo",
        tmp_path / "out",
        ConvertOptions(verify="none", **options),
    )
    with pytest.raises(UnsupportedError, match=message):
        check_recoverable(Checkpoint.open(tmp_path / "out"), None)


def test_a_plain_model_is_to_be_converted_first() -> None:
    with pytest.raises(UnsupportedError, match=r"lpconv\.json") as refused:
        check_recoverable(Checkpoint.open(demo_checkpoint()), None)
    assert "lpconv convert" in (refused.value.hint or "")


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    shutil.copytree(demo_checkpoint(), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", ConvertOptions(verify="none", format="e4m3fn"))
    with pytest.raises(InputError) as raised:
        check_recoverable(Checkpoint.open(tmp_path / "out"), None)
    assert "--source" in str(raised.value.hint)
    found = check_recoverable(Checkpoint.open(tmp_path / "out"), str(tmp_path / "source"))
    assert found.source.directory == tmp_path / "source"


@pytest.mark.parametrize("name", ["method", "layout", "format"])
def test_an_unknown_name_in_the_record_is_refused(name: str, outputs: dict[str, Path], tmp_path: Path) -> None:
    output = shutil.copytree(outputs["int4 groups"], tmp_path / "out")
    document = json.loads((output / "lpconv.json").read_text())
    converted = [t for t in document["tensors"] if t["action"] == "convert"]
    (converted[0] if name == "format" else document["options"])[name] = "other"
    (output / "lpconv.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"unknown {name} `other`"):
        check_recoverable(Checkpoint.open(output), None)


def test_another_source_is_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    finetune("demo", tmp_path / "other", FinetuneOptions(
        arithmetic=arithmetic(recipe="fp32"), steps=1, batch_size=1, seq_len=16, eval_batches=1, twin="none", lr=1e-2
    ))  # fmt: skip
    with pytest.raises(InputError, match="`model"):
        finetune(str(outputs["NVFP4"]), tmp_path / "out", _options(source=str(tmp_path / "other")))
    tiny("llama", tmp_path / "smaller")
    with pytest.raises(InputError, match="tensor") as raised:
        check_recoverable(Checkpoint.open(outputs["NVFP4"]), str(tmp_path / "smaller"))
    assert "--source" in str(raised.value.hint)


def test_trained_outputs_are_refused(tmp_path: Path) -> None:
    options = replace(_options(twin="none"), arithmetic=arithmetic(recipe="unit-fp8"))
    finetune("demo", tmp_path / "out", options)
    with pytest.raises(UnsupportedError, match="trained"):
        check_recoverable(Checkpoint.open(tmp_path / "out"), "demo")


@pytest.mark.parametrize(
    "more",
    [
        {"lca": True},
        {"compile": True},
        {"parallel": "fsdp2"},
        {"weight_decay": 0.1},
        {"gradient_checkpointing": True},
        {"twin": "bf16"},
        {"task": "seq2seq"},
    ],
)
def test_options_that_do_not_apply_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--recover"):
        check_options(_options(**more))
