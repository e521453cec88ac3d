"""Opening outputs in transformers: with the plug-in, through the loader module, and not at all without either."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import lpconv.hf
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.plan.options import ConvertOptions, FormatRule
from tests.helpers.elsewhere import run_script

FORMATS = [("unit", "fp32"), ("unit", "e4m3fn"), ("scalify", "fp16"), ("scalify", "e5m2")]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("outputs")
    for method, fmt in [*FORMATS, ("collage", "bf16"), ("collage", "fp16")]:
        options = ConvertOptions(method=method, format=fmt, verify="none")
        convert("demo", folder / f"{method}-{fmt}", options)
    return {(p.name.split("-")[0], p.name.split("-")[1]): p for p in folder.iterdir()}


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize("key", FORMATS, ids="-".join)
def test_from_pretrained_and_save_again(
    outputs: dict[tuple[str, str], Path], key: tuple[str, str], tmp_path: Path
) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(outputs[key], output_loading_info=True)
    assert not any(info.values())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, state(again)[k]) for k, a in state(model).items())
    saved, converted = (load_file(p / "model.safetensors") for p in (tmp_path, outputs[key]))
    assert saved.keys() == converted.keys()
    assert all(torch.equal(v.view(torch.uint8), converted[k].view(torch.uint8)) for k, v in saved.items())
    source = state(AutoModelForCausalLM.from_pretrained(demo_checkpoint()))
    exact = all(torch.equal(a, source[k]) for k, a in state(model).items())
    assert exact == (key == ("unit", "fp32"))


@pytest.mark.parametrize(
    ("model", "options", "stored_as", "opened_as"),
    [
        # Three kinds among the experts of one layer: codes of two formats, and one matrix left alone.
        (
            "Mixtral",
            {"rules": (FormatRule(pattern="*experts.1*", format="fp16"),), "exclude": ("*layers.1*experts.2.w1*",)},
            "model.layers.0.block_sparse_moe.experts.1.w2.weight",
            lambda layer: layer.mlp.experts.down_proj[1],
        ),
        # It stores `input_linear.weight`, and its model has it as `experts.gate_up_proj`.
        (
            "GraniteMoe",
            {"verify": "logits"},
            "model.layers.0.block_sparse_moe.input_linear.weight",
            lambda layer: layer.block_sparse_moe.experts.gate_up_proj,
        ),
    ],
)
def test_experts_are_decoded_before_they_are_merged_or_renamed_and_saved_as_they_were(
    model: str, options: dict[str, Any], stored_as: str, opened_as: Callable[[Any], torch.Tensor], tmp_path: Path
) -> None:
    config = getattr(transformers, f"{model}Config")(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, num_local_experts=3, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    convert(str(tmp_path / "source"), tmp_path / "out", ConvertOptions(method="unit", format="e4m3fn", **options))
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    stored = load_file(tmp_path / "out/model.safetensors")
    experts = stored[stored_as][0].float() * stored[stored_as + "_scale"]
    assert torch.equal(opened_as(opened.model.layers[0]), experts)
    opened.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(v.view(torch.uint8), stored[k].view(torch.uint8)) for k, v in again.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_saving_loses_of_a_change_is_named(
    outputs: dict[tuple[str, str], Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    """A small update, as of a merged adapter, mostly rounds back to the old codes."""
    name = "model.layers.0.mlp.down_proj.weight"
    model = AutoModelForCausalLM.from_pretrained(outputs["unit", "e4m3fn"], dtype=dtype)
    weight, before = model.get_parameter(name), model.get_parameter(name).detach().clone()
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 2e-3)
    with pytest.warns(UserWarning, match=name) as told:
        model.save_pretrained(tmp_path / "codes")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=dtype).get_parameter(name)
    lost = float(((weight - again).float().norm() / (weight - before).float().norm()).detach())
    assert lost > 0.3
    said = int(re.search(r"loses (\d+)%", str(told[0].message))[1])
    assert said == pytest.approx(100 * lost, abs=3)
    model.dequantize()
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(load_file(tmp_path / "plain/model.safetensors")[name], weight)


def test_another_dtype_is_rounded_to_once_under_either_name(tmp_path: Path) -> None:
    """Codes of more bits than the dtype, and scales that are no powers of two."""
    convert("demo", tmp_path / "out", ConvertOptions(method="unit", format="fp16", scale="exact", verify="none"))
    wide, narrow = (
        state(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(narrow[k], a.bfloat16()) for k, a in wide.items())
    assert lpconv.hf.load(tmp_path / "out", torch_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_base_class_opens_a_checkpoint_with_a_head(outputs: dict[tuple[str, str], Path]) -> None:
    base = AutoModel.from_pretrained(outputs["unit", "fp32"])
    source = AutoModel.from_pretrained(demo_checkpoint())
    assert all(torch.equal(a, state(base)[k]) for k, a in state(source).items())


def test_training_and_saving_keeps_the_scales(outputs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(outputs["scalify", "fp16"])
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for k, a in state(model).items():
        assert torch.allclose(a, state(again)[k], rtol=1e-3, atol=1e-6), k


def test_collage_opens_in_plain_transformers_and_whole_in_lpconv(outputs: dict[tuple[str, str], Path]) -> None:
    source = state(AutoModelForCausalLM.from_pretrained(demo_checkpoint()))
    plain = AutoModelForCausalLM.from_pretrained(outputs["collage", "bf16"])
    assert plain.dtype == torch.bfloat16
    # Half an ulp of bf16, and the 0.1 % of ties that the pair rounds the other way.
    assert all(((a.float() - source[k]).abs() <= 2**-8 * source[k].abs()).all() for k, a in state(plain).items())
    whole = lpconv.hf.load(outputs["collage", "bf16"])
    assert whole.dtype == torch.float32
    for k, a in state(whole).items():
        assert ((a.double() - source[k].double()).abs() <= 2**-17 * source[k].double().abs() + 2**-134).all(), k


SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
path, way = sys.argv[1:]
if way == "plain":
    AutoModelForCausalLM.from_pretrained(path)
sys.modules["lpconv"] = None  # as on a machine without it
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
model.save_pretrained(path + "-saved")
again = AutoModelForCausalLM.from_pretrained(path + "-saved")
assert all(torch.equal(a, again.state_dict()[k]) for k, a in model.state_dict().items())
print("opened", sum(p.numel() for p in model.parameters()))
"""


def test_without_lpconv_a_scaled_output_raises(outputs: dict[tuple[str, str], Path]) -> None:
    done = run_script(SCRIPT, outputs["unit", "e4m3fn"], "plain")
    assert done.returncode != 0
    assert "mismatch" in done.stderr
    assert "opened" not in done.stdout


def test_the_loader_module_needs_no_lpconv(outputs: dict[tuple[str, str], Path]) -> None:
    done = run_script(SCRIPT, outputs["scalify", "e5m2"], "remote")
    assert done.returncode == 0, done.stderr
    assert "opened" in done.stdout
