"""What 8-bit formats leave in 16 bits, through whole conversions: kept as it is, named in the config, or overruled."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lpconv.convert.run import convert, plan
from lpconv.data import demo_checkpoint
from lpconv.errors import UsageError
from lpconv.inspect.headers import inspect
from lpconv.plan.options import ConvertOptions, FormatRule

TINY = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}
MIXTRAL = {**TINY, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}


def source(tmp_path: Path, cls: str, settings: dict[str, int]) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**settings))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def compressed(path: Path, out: Path, *rules: FormatRule) -> list[str]:
    """The modules that the config of a conversion says are not quantised."""
    asked = ConvertOptions(format="e4m3fn", granularity="row", layout="compressed-tensors", rules=rules)
    assert convert(str(path), out, asked).verify.passed
    assert not inspect(out).problems
    found: list[str] = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    return found


@pytest.mark.parametrize(
    ("cls", "settings", "left"),
    [
        ("MixtralForCausalLM", MIXTRAL, ("block_sparse_moe.gate.weight",)),
        ("MambaForCausalLM", TINY, ("mixer.A_log", "mixer.conv1d.weight", "mixer.dt_proj.weight")),
    ],
)
def test_bits_of_what_is_left_are_the_sources(
    cls: str, settings: dict[str, int], left: tuple[str, ...], tmp_path: Path
) -> None:
    path = source(tmp_path, cls, settings)
    result = convert(str(path), tmp_path / "out", ConvertOptions(format="e4m3fn"))
    assert result.verify.passed
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    names = [n for n in before if n.endswith(left)]
    assert len(names) == 2 * len(left)
    for name in names:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    assert any(x.dtype == torch.float8_e4m3fn for x in after.values())


def test_routers_are_named_as_files_have_them(tmp_path: Path) -> None:
    """vLLM makes `Linear` modules of them, by the names of the files; transformers has another class for them."""
    ignored = compressed(source(tmp_path, "MixtralForCausalLM", MIXTRAL), tmp_path / "out")
    assert {f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)} < {*ignored}
    assert len(ignored) == len({*ignored})


def test_a_rule_converts_what_would_be_left(tmp_path: Path) -> None:
    path = source(tmp_path, "MambaForCausalLM", TINY)
    names = {f"backbone.layers.{i}.mixer.dt_proj" for i in range(2)}
    assert names < {*compressed(path, tmp_path / "default")}
    ruled = compressed(path, tmp_path / "ruled", FormatRule(pattern="*dt_proj.weight", format="e4m3fn"))
    assert not names & {*ruled}
    own = ConvertOptions(format="e4m3fn", rules=(FormatRule(pattern="*.A_log", format="e4m3fn"),))
    convert(str(path), tmp_path / "own", own)
    stored = load_file(tmp_path / "own/model.safetensors")
    assert stored["backbone.layers.0.mixer.A_log"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("given", [{"exclude": ("*.v_proj",)}, {"include": ("*.1.mlp.up_proj.weight",)}])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "TRANSFORMERS_MXFP8"])
def test_weights_that_vllm_fuses_get_one_format(scheme: str, given: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    """vLLM 0.32 refuses others (`should_ignore_layer` in compressed_tensors/utils.py, `is_layer_skipped` for fp8)."""
    asked = ConvertOptions(scheme=scheme, **given)  # type: ignore[arg-type]  # patterns only
    with pytest.raises(UsageError, match=r"v_proj \(kept\)|gate_proj \(kept\)") as refused:
        convert(str(demo_checkpoint()), tmp_path / "out", asked)
    suggested = dict.fromkeys(given, (str(refused.value.hint).split("'")[1],))
    plan(str(demo_checkpoint()), tmp_path / "out", replace(asked, **suggested))  # type: ignore[arg-type]  # patterns
    assert convert(str(demo_checkpoint()), tmp_path / "out", replace(asked, allow_mixed_groups=True)).verify.passed


def test_sizes_that_keep_one_part_wide_keep_what_is_fused_with_it(tmp_path: Path) -> None:
    """k_proj and v_proj of the demo model have half a block of 128 rows."""
    result = convert(str(demo_checkpoint()), tmp_path / "out", ConvertOptions(scheme="TRANSFORMERS_FP8"))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    attention = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(4) for part in "qkv"]
    assert {n for n in config["modules_to_not_convert"] if "layers" in n} == {*attention}
    assert any("k_proj" in warning for warning in result.warnings)
