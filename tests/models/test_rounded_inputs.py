"""Inputs are rounded as the package compressed-tensors rounds them, and int8 as vLLM does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lpconv.advise.options import AdviseOptions
from lpconv.advise.subject import open_converted, open_subject
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.layouts.reader import StoredTensors
from lpconv.models.load import open_as_served, open_in_files
from lpconv.models.rounded_inputs import InputRounding
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.storage.checkpoint import Checkpoint
from lpconv.verify.outputs import verification_inputs
from tests.helpers.elsewhere import opens_elsewhere
from tests.helpers.models import tiny, with_demo_tokenizer

IDS = torch.arange(3, 35).view(2, 16)
STORED = {"FP8": 0.3, "NVFP4": 20.0}


@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4"])
def test_numbers_are_those_of_the_package(name: str) -> None:
    """Tokens of all sizes, one of zeros; with a stored scale some are cut off."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2.5, 40).view(40, 1)
    x[0, 3] = 0
    args = preset_name_to_scheme(name, ["Linear"]).input_activations
    stored = torch.tensor([STORED[name]]) if name in STORED else None
    scale, zeros, factor = stored, torch.zeros(1), stored if name == "NVFP4" else None
    if name != "FP8":
        scale, zeros = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=factor)
    wanted = fake_quantize(x, scale, zeros, args, global_scale=factor)
    rounding = InputRounding.of(args.model_dump(mode="json"), stored)
    assert rounding is not None
    assert torch.equal(rounding(x), wanted)
    assert rounding(x.bfloat16()).dtype == torch.bfloat16


def test_what_nobody_rounds() -> None:
    settings: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    rounding = InputRounding.of(settings, None)
    assert rounding is not None
    assert rounding(torch.zeros(0, 64)).shape == (0, 64)
    for unknown in ({"num_bits": 3, "type": "float"}, {"symmetric": False}, {"strategy": "attn_head"}):
        assert InputRounding.of(settings | unknown, None) is None


def test_a_model_runs_as_in_the_package(tmp_path: Path) -> None:
    """Its own forward pass in fp32, with all settings from config.json and stored scales from the files."""
    names = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
    for name in (*names, "NVFP4"):
        text = "demo" if name in STORED else None
        convert("demo", tmp_path / name, ConvertOptions(scheme=name, calibrate=text, verify="none"))
    found = opens_elsewhere(*(tmp_path / n for n in names), dtype="float32")
    for name, (wanted, _, _) in zip(names, found, strict=True):
        logits = []
        for rounds in (True, False):
            with open_in_files(tmp_path / name, rounds_inputs=rounds) as (model, _), torch.no_grad():
                logits.append(model(input_ids=IDS).logits)
        error, effect = ((x - wanted).norm() for x in logits)
        assert error < effect / 100, name
    weight = "model.layers.0.mlp.down_proj.weight"
    with StoredTensors.open(tmp_path / "NVFP4") as stored:  # the package runs it in bf16 only
        asked = stored.inputs_of(weight)
    assert asked is not None
    assert asked[0]["dynamic"] == "local"
    wanted = load_file(tmp_path / "NVFP4/model.safetensors")[weight.replace("weight", "input_global_scale")]
    assert torch.equal(asked[1], wanted)


def test_advice_runs_a_model_with_experts_as_it_is_served(tmp_path: Path) -> None:
    source = with_demo_tokenizer(tiny("mixtral", tmp_path / "source", vocab_size=512, max_position_embeddings=64))
    result = convert(source, tmp_path / "out", ConvertOptions(scheme="W8A8", verify="logits"))
    assert any("vLLM" in w for w in result.warnings)  # transformers cannot open these experts
    subject = open_subject(Checkpoint.open(source), AdviseOptions(seq_len=16), Silent())
    model, _ = open_converted(subject, {"scheme": "W8A8"}, Silent())
    with open_as_served(tmp_path / "out") as served, torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, served(input_ids=IDS).logits)


def test_the_check_of_a_conversion_runs_the_model_as_it_is_served(tmp_path: Path) -> None:
    """Against plain torch: stored codes times scales, and inputs rounded to int8 with a scale for each token."""
    check = convert("demo", tmp_path / "out", ConvertOptions(scheme="W8A8", verify="logits")).verify.logits
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32)
    inputs = verification_inputs(model, demo_checkpoint()).tensors
    stored = load_file(tmp_path / "out/model.safetensors")

    def rounded(_: torch.nn.Module, x: tuple[torch.Tensor]) -> torch.Tensor:
        scale = x[0].abs().amax(-1, keepdim=True) / 127
        return (x[0] / scale).round() * scale

    with torch.no_grad():
        logits = [model(**inputs).logits]
        for name, module in model.named_modules():
            if f"{name}.weight_scale" in stored:
                module.weight.copy_(stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"])
                module.register_forward_pre_hook(rounded)
        logits.append(model(**inputs).logits)
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert check is not None
    assert check.rel_error == pytest.approx(float(error), rel=0.01)  # 0.004 without rounded inputs, 0.010 with them
    assert check.rounded_inputs is not None
