"""Weights that stay codes: what such a model says, what it holds, what it saves, and what it refuses."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lpconv
from lpconv.convert.run import convert
from lpconv.errors import UnsupportedError
from lpconv.forms import Kept
from lpconv.layouts.reader import StoredTensors
from lpconv.models.coded import CodedTensor
from lpconv.plan.options import ConvertOptions
from lpconv.storage.staging import MARKER
from tests.helpers.foreign_files import gpt_oss, make_foreign
from tests.helpers.models import IDS, WIDE, tiny

OURS: dict[str, dict[str, Any]] = {
    "unit": {"method": "unit", "format": "e4m3fn"},
    "rows": {"method": "scalify", "format": "e5m2", "granularity": "row"},
    "blocks": {"method": "unit", "format": "e4m3fn", "granularity": "128x128"},
    "mx": {"method": "unit", "format": "e2m1", "granularity": "mx"},
    "fp16": {"method": "unit", "format": "fp16"},
    "multipoint": {"method": "multipoint", "format": "int4"},
    "bits": {"method": "unit", "budget_bits": 6.0},
    "compressed-tensors": {"method": "unit", "format": "e4m3fn", "layout": "compressed-tensors"},
}
THEIRS = (
    "ct FP8_BLOCK",
    "ct MXFP4",
    "ct NVFP4",
    "ct W4A16_ASYM",
    "fp8 ue8m0",
    "modelopt NVFP4",
    "modelopt W4A8_AWQ",
    "gptq desc_act",
    "awq",
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a matrix of these models, with one that is smaller than the others."""
    monkeypatch.setattr("lpconv.models.coded._BLOCK", 2500)


def plain(folder: Path, model: str = "llama") -> Path:
    return tiny(model, folder / "plain", **WIDE[model])


def ours(folder: Path, options: dict[str, Any], model: str = "llama") -> Path:
    convert(str(plain(folder, model)), folder / "out", ConvertOptions(verify="none", **options))
    return folder / "out"


def stored(folder: Path, layout: str) -> Path:
    return ours(folder, OURS[layout]) if layout in OURS else make_foreign(layout, plain(folder), folder / "out")


def logits(model: Any) -> Tensor:
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        found: Tensor = model(input_ids=IDS, **inputs).logits
    return found


def coded(model: nn.Module) -> list[CodedTensor]:
    return [p for p in model.parameters() if isinstance(p, CodedTensor)]


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(-1).view(torch.uint8), b[n].view(-1).view(torch.uint8))
        for n in a
    )


def check(directory: Path, folder: Path) -> Any:
    """Says what the decoded model says, saves the bytes of the file, and opens from them again."""
    decoded, resident = lpconv.load(directory, dtype=torch.float32), lpconv.load(directory, resident=True)
    assert coded(resident)
    assert {n: p.shape for n, p in decoded.named_parameters()} == {n: p.shape for n, p in resident.named_parameters()}
    wanted, got = logits(decoded), logits(resident.float())
    # Sums of 192 products at most, in blocks: 2K·2⁻²⁴ is 2e-5 of logits near 1, for the few layers of these models.
    assert (wanted - got).abs().max() <= 1e-4 * wanted.abs().max()
    resident = lpconv.load(directory, resident=True)
    written = load_file(directory / "model.safetensors")
    held = {x.data_ptr(): x.nbytes for p in coded(resident) for c in p.pieces for x in c.parts.values()}
    assert sum(held.values()) <= sum(x.nbytes for x in written.values())
    resident.save_pretrained(folder / "again")
    assert same_bytes(load_file(folder / "again" / "model.safetensors"), written)
    assert torch.equal(logits(lpconv.load(folder / "again", dtype=torch.float32, resident=True)), got)
    return resident


@pytest.mark.parametrize("layout", [*OURS, *THEIRS])
def test_our_outputs_and_the_layouts_of_others(tmp_path: Path, layout: str) -> None:
    check(stored(tmp_path, layout), tmp_path)


def test_settings_in_a_file_of_their_own_are_saved_in_the_config(tmp_path: Path) -> None:
    directory = make_foreign("modelopt NVFP4", plain(tmp_path), tmp_path / "out")
    config = json.loads((directory / "config.json").read_text())
    settings = config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    resident = check(directory, tmp_path)
    assert resident.config.quantization_config == settings


@pytest.mark.parametrize("layout", [*OURS, *THEIRS])
def test_a_decoded_weight_is_rounded_once_from_fp32(tmp_path: Path, layout: str) -> None:
    """Zeros of both signs, rows of a millionth, of 1e-30 and of thousands included: subnormal and infinite in fp16."""
    source = plain(tmp_path)
    tensors = load_file(source / "model.safetensors")
    for x in tensors.values():
        if x.ndim == 2:
            x[:6] *= torch.tensor([[0.0], [-0.0], [1e-6], [1e-30], [3e3], [1e5]])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    if layout in OURS:
        convert(str(source), tmp_path / "out", ConvertOptions(verify="none", **OURS[layout]))
    else:
        make_foreign(layout, source, tmp_path / "out")
        (tmp_path / "out" / MARKER).write_text("{}")  # weights this large are suspicious in third-party files
    with StoredTensors.open(tmp_path / "out") as opened:
        names = [n for n, form in opened.forms.items() if not isinstance(form, Kept) and len(form.shape) == 2]
        assert names
        for name, dtype in itertools.product(names, (torch.bfloat16, torch.float16, torch.float32, torch.float64)):
            got = CodedTensor.from_form(opened.forms[name], opened.read_components(name)).to(dtype).decode()
            assert same_bytes({"": got}, {"": opened.tensor(name).to(dtype)}), (name, dtype)


@pytest.mark.parametrize("model", [m for m in WIDE if m != "llama"])
def test_kinds_of_models(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix but GPT-2's, which lie on their side, is decoded whole."""
    directory = ours(tmp_path, OURS["rows"], model)
    whole: list[torch.Size] = []
    decoded = CodedTensor.decode

    def counted(x: CodedTensor) -> Tensor:
        whole.append(x.shape)
        return decoded(x)

    monkeypatch.setattr(CodedTensor, "decode", counted)
    resident = check(directory, tmp_path)
    rows = {s for s in whole if len(s) == 2 and s[0] <= len(IDS.unique())}
    sideways = {
        p.shape for n, p in resident.named_parameters() if n.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))
    }
    assert set(whole) - rows == (sideways if model == "gpt2" else set())


def test_experts_of_gpt_oss_stay_on_their_side(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **WIDE["llama"] | {"intermediate_size": 64, "num_key_value_heads": 2},
        vocab_size=96,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        tensors |= gpt_oss(name, tensors.pop(name))
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(
        json.dumps(written | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    resident = check(tmp_path / "out", tmp_path)
    assert {p.ndim for p in coded(resident)} == {3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ours(tmp_path_factory.mktemp("resident"), OURS["unit"])


def test_text_is_generated_and_the_tie_is_kept(directory: Path) -> None:
    model, decoded = lpconv.load(directory, resident=True), lpconv.load(directory)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS[:1], **options), decoded.generate(IDS[:1], **options))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("layout", [*OURS, *THEIRS])
def test_a_model_that_is_opened_in_inference_mode_generates_there_and_is_the_same(tmp_path: Path, layout: str) -> None:
    path = stored(tmp_path, layout)
    options = {"max_new_tokens": 6, "do_sample": False}
    outside = lpconv.load(path, resident=True)
    with torch.inference_mode():
        model = lpconv.load(path, resident=True)
        tokens = model.generate(IDS[:1], **options)
    assert torch.equal(tokens, outside.generate(IDS[:1], **options))
    assert len(coded(model)) == len(coded(outside)) > 0
    assert same_bytes(model.state_dict(), outside.state_dict())
    assert torch.equal(logits(model.bfloat16()), logits(outside.bfloat16()))


@pytest.mark.parametrize("layout", ["fp16", "compressed-tensors", "awq"])
def test_a_decoded_model_that_is_opened_in_inference_mode_trains_elsewhere(tmp_path: Path, layout: str) -> None:
    path = stored(tmp_path, layout)
    with torch.inference_mode():
        model = lpconv.load(path, dtype=torch.float32)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_another_dtype_and_a_copy_keep_the_codes(directory: Path) -> None:
    model = lpconv.load(directory, resident=True)
    wanted = logits(lpconv.load(directory).bfloat16())  # which also rounds what no checkpoint has
    assert torch.equal(logits(model.bfloat16()), wanted)
    again = copy.deepcopy(model)
    assert torch.equal(logits(again), wanted)
    assert len(coded(again)) == len(coded(model)) > 0


def test_codes_have_no_gradient_and_are_not_written(directory: Path) -> None:
    model = lpconv.load(directory, resident=True)
    with pytest.raises(UnsupportedError, match="gradient"):
        model(IDS, labels=IDS).loss.backward()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="written"):
        model.lm_head.weight.mul_(2)


@pytest.mark.parametrize("ids", [[-1, 0], [94, 95, 96], [96]])
def test_ids_outside_the_table_are_an_error_as_in_torch(directory: Path, ids: list[int]) -> None:
    table = lpconv.load(directory, resident=True).model.embed_tokens
    assert len(table.weight) == 96
    with pytest.raises(IndexError):
        table(torch.tensor(ids))


@pytest.mark.parametrize("index", [2, -3, torch.tensor(2)])
def test_an_expert_that_a_stack_does_not_have_is_an_error_as_in_torch(directory: Path, index: Any) -> None:
    weight = lpconv.load(directory, resident=True).lm_head.weight.detach()
    with pytest.raises(IndexError):
        torch.stack([weight, weight])[index]


def test_gradients_through_an_op_that_decodes_are_refused_too(tmp_path: Path) -> None:
    model = lpconv.load(ours(tmp_path, OURS["unit"], "gpt2"), resident=True)
    with pytest.raises(UnsupportedError, match="gradient"):
        model.transformer.h[0].mlp.c_fc(torch.ones(1, 64)).sum().backward()


def test_what_is_not_codes_is_opened_as_ever(tmp_path: Path) -> None:
    source = plain(tmp_path)
    assert torch.equal(logits(lpconv.load(source, resident=True)), logits(lpconv.load(source)))


def gradients(model: Any, autocast: bool) -> dict[str, Tensor]:
    """Gradients of everything that is not codes: norms and biases on both sides of every product."""
    for p in coded(model):
        p.requires_grad_(False)
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS, **inputs).loss
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def check_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal to 1e-5 of the largest: some, such as those of the biases of keys, are zero but for rounding."""
    assert any("norm" in name.lower() or "ln_" in name for name in got)
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in got.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("layout", [*OURS, *THEIRS])
def test_gradients_to_inputs_are_those_of_the_decoded_weights(tmp_path: Path, layout: str) -> None:
    path = stored(tmp_path, layout)
    got = gradients(lpconv.load(path, dtype=torch.float32, resident=True), autocast=False)
    wanted = gradients(lpconv.load(path, dtype=torch.float32), autocast=False)
    check_gradients(got, wanted)


@pytest.mark.parametrize("model", WIDE)
def test_gradients_of_kinds_of_models(tmp_path: Path, model: str) -> None:
    path = ours(tmp_path, OURS["mx"], model)
    got = gradients(lpconv.load(path, dtype=torch.float32, resident=True), autocast=False)
    wanted = gradients(lpconv.load(path, dtype=torch.float32, experts_implementation="eager"), autocast=False)
    check_gradients(got, wanted)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert"])
def test_no_decoded_weight_is_kept_for_the_backward_pass(tmp_path: Path, model: str, autocast: bool) -> None:
    resident = lpconv.load(ours(tmp_path, OURS["mx"], model), dtype=torch.float32, resident=True)
    weights = {tuple(p.shape) for p in coded(resident)}
    kept: set[tuple[int, ...]] = set()

    def keep(x: Tensor) -> Tensor:
        if not isinstance(x, CodedTensor):
            kept.add(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = gradients(resident, autocast)
    assert found
    assert kept
    assert not kept & (weights | {shape[::-1] for shape in weights})


def test_autocast_multiplies_codes_in_bf16(tmp_path: Path) -> None:
    path = ours(tmp_path, OURS["mx"])
    got = gradients(lpconv.load(path, dtype=torch.float32, resident=True), autocast=True)
    wanted = gradients(lpconv.load(path, dtype=torch.float32), autocast=True)
    exact = gradients(lpconv.load(path, dtype=torch.float32), autocast=False)
    for name, x in got.items():
        scale = float(exact[name].norm())
        assert 1e-5 * scale < float((x - exact[name]).norm()) < 0.05 * scale
        assert float((x - wanted[name]).norm()) < 0.05 * scale
