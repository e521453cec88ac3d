"""Experts in the layouts of others: each has the name that its file gives it, and readers stack them.

What readers cannot take is refused before the work: several experts in one tensor, and half of a layer's experts.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lpconv
from lpconv.cli.main import app
from lpconv.convert.run import convert, plan
from lpconv.errors import UnsupportedError, VerificationError
from lpconv.inspect.headers import inspect
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions, FormatRule
from tests.helpers.elsewhere import opens_elsewhere, run_script
from tests.helpers.models import tiny, with_demo_tokenizer

LAYOUTS: dict[str, dict[str, Any]] = {
    "FP8": {},
    "FP8_DYNAMIC": {"granularity": "row"},
    "W4A16": {"granularity": "group:32", "format": "int4"},
    "NVFP4A16": {"granularity": "nvfp4", "format": "e2m1"},
    "MXFP4A16": {"granularity": "mx", "format": "e2m1"},
    "NVFP4A16, experts FP8": {
        "granularity": "nvfp4", "format": "e2m1", "rules": (FormatRule(pattern="*.experts.*", format="e4m3fn"),),
    },
    "fp8": {"granularity": "128x128", "layout": "transformers"},
    "mxfp8": {"granularity": "mx", "layout": "transformers"},
}  # fmt: skip
_SMALL = {
    "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "intermediate_size": 128, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 3}, ("w1", "w3", "w2")),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 3, "moe_intermediate_size": 128, "head_dim": 64},
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def small(kind: str, folder: Path, num_layers: int = 1, **changed: Any) -> Path:
    name, more, _ = MODELS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = cls.config_class(**_SMALL | more | {"num_hidden_layers": num_layers} | changed)
    cls(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def granite_moe(folder: Path) -> Path:
    config = transformers.GraniteMoeConfig(**_SMALL, num_local_experts=3)
    torch.manual_seed(0)
    transformers.GraniteMoeForCausalLM(config).save_pretrained(folder)
    return folder


def options_of(layout: str, **more: Any) -> ConvertOptions:
    asked = {"format": "e4m3fn", "layout": "compressed-tensors", "verify": "weights", **LAYOUTS[layout], **more}
    return ConvertOptions(**asked)


def quantization(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_plain_transformers_stacks_the_experts_that_we_decode(kind: str, tmp_path: Path) -> None:
    source = small(kind, tmp_path / "source")
    paths = {layout: tmp_path / layout for layout in LAYOUTS}
    for layout, path in paths.items():
        convert(str(source), path, options_of(layout))
    opened = dict(zip(paths, opens_elsewhere(*paths.values()), strict=True))
    names = MODELS[kind][2]
    for layout, path in paths.items():
        logits, _, weights = opened[layout]
        experts = {n: x for n, x in weights.items() if "experts." in n}
        with StoredTensors.open(path) as stored:
            coded = [n for n, form in stored.forms.items() if form.format is not None]
            assert len(coded) == 4 + 3 * 3, layout
            ours = [torch.stack([stored.tensor(n) for n in coded if n.endswith(f".{name}.weight")]) for name in names]
        gate_up, down = experts.values()
        ours = [x.to(down.dtype) for x in ours]  # of integers fp32, as their scales are
        assert torch.equal(gate_up, torch.cat(ours[:2], 1)), layout
        assert torch.equal(down, ours[2]), layout
        assert all("gate" in n or n == "lm_head" for n in ignored_by(path)), layout
        assert not inspect(path).problems
        with torch.inference_mode():
            wanted = lpconv.load(path)(input_ids=torch.arange(3, 35).view(2, 16)).logits
        assert (logits - wanted).norm() < (0.2 if layout == "FP8_DYNAMIC" else 0.01) * wanted.norm(), layout


def ignored_by(path: Path) -> list[str]:
    config = quantization(path)
    found: list[str] = config["ignore"] if "ignore" in config else config["modules_to_not_convert"]
    return found


@pytest.mark.parametrize(
    ("layout", "more", "said"),
    [
        ("W4A16", {"exclude": ("*.experts.1.*",)}, r"experts\.1\.w1\.weight`.*format"),
        ("W4A16", {"rules": (FormatRule(pattern="*.w2*", format="int8"),)}, r"experts\.0\.w2\.weight`.*format"),
        ("W4A16", {"exclude": ("*layers.0.*experts*",)}, "transformers.*keep"),
        ("FP8", {"calibrate": "demo"}, "--calibrate"),
    ],
)
def test_half_of_the_experts_is_refused(layout: str, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = with_demo_tokenizer(small("mixtral", tmp_path / "source", 2, vocab_size=300))
    with pytest.raises(UnsupportedError, match=said):
        plan(str(source), tmp_path / "out", options_of(layout, **more))


@pytest.mark.parametrize("layout", ["FP8_DYNAMIC", "fp8"])
def test_several_experts_in_one_tensor_are_refused_by_name(layout: str, tmp_path: Path) -> None:
    source = granite_moe(tmp_path / "source")
    with pytest.raises(UnsupportedError, match=r"block_sparse_moe\.input_linear\.weight`") as refused:
        plan(str(source), tmp_path / "out", options_of(layout))
    assert refused.value.hint is not None
    assert "--exclude '*.block_sparse_moe.*'" in refused.value.hint
    convert(str(source), tmp_path / "out", options_of(layout, exclude=("*.block_sparse_moe.*",)))
    assert "model.layers.0.block_sparse_moe.experts" in ignored_by(tmp_path / "out")


def test_experts_of_gpt_oss_are_those_that_transformers_decodes(tmp_path: Path) -> None:
    more = {"num_local_experts": 3, "head_dim": 64, "intermediate_size": 64, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**_SMALL | more)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    options = ConvertOptions(scheme="GPT_OSS_MXFP4", verify="weights")
    found = convert(str(tmp_path / "source"), tmp_path / "out", options)
    names = [t.name for t in found.tensors if t.action == "convert"]
    ((_, _, weights),) = opens_elsewhere(tmp_path / "out", dtype="bfloat16")
    with StoredTensors.open(tmp_path / "out") as stored:
        assert [tuple(stored.tensor(n).shape) for n in names] == [(3, 64, 128), (3, 128, 128)]
        assert all(torch.equal(weights[n].float(), stored.tensor(n)) for n in names)
    assert lpconv_verifies(tmp_path / "out", tmp_path / "source")
    convert(str(tmp_path / "out"), tmp_path / "again", options)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        plan(str(tmp_path / "source"), tmp_path / "no", dataclasses.replace(options, exclude=("*down_proj",)))
    with pytest.raises(UnsupportedError, match="gpt-oss"):
        plan(str(granite_moe(tmp_path / "granite")), tmp_path / "no", options)


def test_nvfp4_of_experts_has_a_second_scale_only_where_it_is_asked_for(tmp_path: Path) -> None:
    source = small("mixtral", tmp_path / "source")
    found = convert(str(source), tmp_path / "out", options_of("NVFP4A16"))
    assert any("48371" in w and "--scale exact" in w for w in found.warnings)
    factors = {n: float(x) for n, x in load_file(tmp_path / "out/model.safetensors").items() if "global" in n}
    assert {x for n, x in factors.items() if "experts" in n} == {1.0}
    assert {x for n, x in factors.items() if "experts" not in n} != {1.0}
    assert lpconv_verifies(tmp_path / "out", source)
    exact = convert(str(source), tmp_path / "exact", options_of("NVFP4A16", scale="exact"))
    assert any("48371" in w for w in exact.warnings)
    factors = {n: float(x) for n, x in load_file(tmp_path / "exact/model.safetensors").items() if "global" in n}
    assert min(factors.values()) > 1000
    tensors = load_file(source / "model.safetensors")
    save_file({n: x / 16 for n, x in tensors.items()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"experts\.0\.w1\.weight`.* 0\.001 .*e4m3fn"):
        convert(str(source), tmp_path / "small", options_of("NVFP4A16"))


def lpconv_verifies(path: Path, source: Path) -> bool:
    done = CliRunner().invoke(app, ["verify", str(path), "--against", str(source), "--level", "weights"])
    return done.exit_code == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extra_weights_are_named_as_not_quantised(layout: str, tmp_path: Path) -> None:
    """Layers for several tokens ahead, which transformers leaves out and others build."""
    source = small("qwen3_moe", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    layer = {n.replace("model.layers.0", "mtp.layers.0"): x.clone() for n, x in tensors.items() if ".layers.0." in n}
    extra = {**layer, "mtp.fc.weight": torch.ones(128, 256).bfloat16(), "mtp.embed_tokens.weight": torch.ones(96, 128)}
    save_file(tensors | extra, source / "model.safetensors", {"format": "pt"})
    found = convert(str(source), tmp_path / "out", options_of(layout))
    kept = {t.name.removesuffix(".weight") for t in found.tensors if t.action == "keep" and len(t.shape) > 1}
    assert kept - {"model.embed_tokens"} <= {*ignored_by(tmp_path / "out")}
    assert {"mtp.fc", "mtp.embed_tokens", "mtp.layers.0.mlp.experts.2.up_proj"} <= {*ignored_by(tmp_path / "out")}
    assert not inspect(tmp_path / "out").problems


@pytest.mark.parametrize("layout", ["FP8_DYNAMIC", "W4A16", "mxfp8"])
def test_a_body_without_its_head_has_the_names_of_the_model(layout: str, tmp_path: Path) -> None:
    """config.json names the class with a head, the file the modules of the bare model."""
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=2, vocab_size=96,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "source")
    document = json.loads((tmp_path / "source/config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "source/config.json").write_text(json.dumps(document))
    asked = options_of(layout, exclude=("*.query.*",), allow_mixed_groups=True, allow_missing=True)
    found = convert(str(tmp_path / "source"), tmp_path / "out", asked)
    assert sum(t.action == "convert" for t in found.tensors) == 5
    ignored = ignored_by(tmp_path / "out")
    name = "encoder.layer.0.attention.self.query"
    assert {name, f"bert.{name}", "cls.predictions.decoder"} <= {*ignored}
    done = run_script(BODY, tmp_path / "out")
    assert done.returncode == 0, done.stderr


BODY = """
import sys
sys.modules["lpconv"] = None
import transformers
model, info = transformers.BertForMaskedLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert all(n.startswith("cls.") for n in info["missing_keys"]), info
assert not info["unexpected_keys"] and not info["mismatched_keys"], info
"""


def test_an_output_that_inspect_calls_wrong_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.plan.files._kept_modules", lambda *_: [])
    source = tiny("llama", tmp_path / "source")
    with pytest.raises(VerificationError, match=r"o_proj.*config\.json"):
        convert(str(source), tmp_path / "out", options_of("FP8", exclude=("*.0.*o_proj*",)))
    assert not (tmp_path / "out").exists()
