"""`convert --kv-cache`: scales of keys and values next to compressed-tensors weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicCache

from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, text_at
from lpconv.errors import UnsupportedError, UsageError
from lpconv.layouts.compressed_config import cache_scale_name
from lpconv.models.load import load
from lpconv.models.tasks import cache_argument
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.verify import verify_output
from lpconv.verify.options import VerifyOptions

_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def converted(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The scales of keys and values in an output."""
    convert(str(demo_checkpoint()), folder, ConvertOptions(kv_cache="fp8", verify="weights", **options))
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] == _SCHEME
    tensors = load_file(folder / "model.safetensors")
    return {n: x for n, x in tensors.items() if n.endswith((".k_scale", ".v_scale"))}


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_without_a_text_the_scales_are_one(scheme: str, tmp_path: Path) -> None:
    scales = converted(tmp_path / "out", scheme=scheme)
    layers = json.loads((demo_checkpoint() / "config.json").read_text())["num_hidden_layers"]
    assert set(scales) == {f"model.layers.{i}.self_attn.{x}_scale" for i in range(layers) for x in "kv"}
    assert all(torch.equal(x, torch.ones(1)) for x in scales.values())


@pytest.mark.parametrize("tower", ["vision_tower.encoder.layers.1.self_attn", "model.visual.blocks.1.attn"])
def test_a_vision_tower_has_no_cache(tower: str) -> None:
    assert cache_scale_name(f"{tower}.k_proj.weight") is None
    assert cache_scale_name("language_model.layers.1.self_attn.k_proj.weight") is not None


def test_a_text_gives_the_largest_keys_and_values(tmp_path: Path) -> None:
    scales = converted(tmp_path / "out", scheme="FP8_DYNAMIC", calibrate="demo")
    record = json.loads((tmp_path / "out" / "lpconv.json").read_text())["calibration"]
    assert set(record["absmax"]) == set(scales)
    model = load(demo_checkpoint(), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_checkpoint())
    ids = tokenizer(text_at("demo").read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    windows = ids[: record["num_tokens"]].view(-1, record["seq_len"])
    largest = dict.fromkeys(scales, 0.0)
    for window in windows.split(8):
        cache = DynamicCache()
        with torch.no_grad():
            model(window, **{cache_argument(type(model)) or "": cache}, use_cache=True)
        for i, layer in enumerate(cache.layers):
            for name, x in (("k", layer.keys), ("v", layer.values)):
                key = f"model.layers.{i}.self_attn.{name}_scale"
                largest[key] = max(largest[key], float(x.abs().max()))
    for name, scale in scales.items():
        assert scale.item() == pytest.approx(largest[name] / 448, rel=1e-4)


def test_error_feedback_writes_the_same_scales_but_for_its_windows(tmp_path: Path) -> None:
    nearest = converted(tmp_path / "nearest", scheme="W4A16", calibrate="demo")
    more: dict[str, Any] = {"rounding": "gptq", "calibration_tokens": 512}
    gptq = converted(tmp_path / "gptq", scheme="W4A16", calibrate="demo", **more)
    assert nearest.keys() == gptq.keys()
    assert all(0.5 < float(x / nearest[n]) < 2 for n, x in gptq.items())
    one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in ("nearest", "gptq"))
    assert not all(torch.equal(x, other[n]) for n, x in one.items() if n.endswith("weight_packed"))
    assert verify_output(tmp_path / "gptq", VerifyOptions(level="weights"), progress=Silent()).passed


def test_transformers_opens_it_with_its_scales(tmp_path: Path) -> None:
    scales = converted(tmp_path / "out", scheme="FP8_DYNAMIC", calibrate="demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    if not hasattr(model.model.layers[0].self_attn, "k_scale"):
        pytest.skip("this compressed-tensors adds no scales of keys and values to this transformers")
    for name, scale in scales.items():
        assert torch.equal(model.get_parameter(name).detach().view(1), scale), name
    ids = torch.arange(40, 60)[None]
    ours = load(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(ids, use_cache=True).logits
        assert (theirs - ours(ids).logits).abs().max() < 0.5  # keys and values are rounded to e4m3fn


def test_verify_sees_a_changed_scale(tmp_path: Path) -> None:
    converted(tmp_path / "out", scheme="FP8_DYNAMIC", calibrate="demo")
    path = tmp_path / "out" / "model.safetensors"
    options = VerifyOptions(against=str(demo_checkpoint()), level="weights")
    assert verify_output(tmp_path / "out", options, progress=Silent()).passed
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_scale"] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    changed = verify_output(tmp_path / "out", options, progress=Silent())
    assert not changed.passed
    assert any("SHA256SUMS" not in problem for problem in changed.problems), changed.problems


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"format": "e4m3fn"}, UsageError),
        ({"scheme": "FP8_DYNAMIC", "exclude": ("*.0.*.[qkv]_proj.weight",)}, UnsupportedError),
    ],
)
def test_outputs_without_a_place_for_the_scales_are_refused(
    options: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        convert(str(demo_checkpoint()), tmp_path / "out", ConvertOptions(kv_cache="fp8", **options))
    assert not list(tmp_path.iterdir())
