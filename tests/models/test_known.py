"""Models whose modules are known by name: they are what transformers builds."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import save_file

from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import UnsupportedError
from lpconv.models.empty import compare_empty, empty_model, linear_modules
from lpconv.models.whole import FAMILIES, Fit, compare_with_model, known_linears, known_shapes
from lpconv.plan.options import ConvertOptions
from lpconv.storage.checkpoint import Checkpoint

# Some configs have no default of their own for these.
SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "pad_token_id": 0}


def config_of(family: tuple[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = transformers.AutoConfig.for_model(family[1], **SMALL).to_dict()
    return {**config, "architectures": [family[0]]}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[1])
def test_what_is_known_of_a_family_is_what_transformers_builds(tmp_path: Path, family: tuple[str, str]) -> None:
    config = config_of(family)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    contents = Checkpoint.open(tmp_path)
    stored = {name: tuple(x.shape) for name, x in empty_model(contents).state_dict().items()}
    assert known_linears(config, stored) == linear_modules(contents, stored)
    norm = "model.layers.0.input_layernorm.weight"
    lacking = {n: (n == norm and (7,)) or s for n, s in stored.items() if "layers.2.mlp.up" not in n}
    assert compare_with_model(contents, lacking) == Fit(**compare_empty(contents, lacking))
    del stored["lm_head.weight"]  # as where it is tied
    assert known_linears(config, stored) == linear_modules(contents, stored)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[1])
@pytest.mark.parametrize("without", [(), ("head_dim",), ("num_key_value_heads",)], ids=str)
def test_the_shapes_that_are_known_of_a_family_are_those_of_transformers(
    tmp_path: Path, family: tuple[str, str], without: tuple[str, ...]
) -> None:
    config = {k: v for k, v in config_of(family).items() if k not in without}
    known = known_shapes(config)
    if known is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({}, tmp_path / "model.safetensors")
        built = empty_model(Checkpoint.open(tmp_path)).state_dict()
        assert known == {name: tuple(x.shape) for name, x in built.items()}
    else:
        assert without


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LlamaModel"]},
        {"architectures": None},
        {"architectures": ["LlamaForCausalLM", "LlamaModel"]},
        {"model_type": "mistral"},
        {"num_hidden_layers": None},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 4},
        {"num_attention_heads": None},
        {"num_attention_heads": 0},
        {"num_attention_heads": "4"},
        {"num_attention_heads": 5},
        {"hidden_size": None},
        {"auto_map": {"AutoConfig": "own.Config"}},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_nothing_is_known_of_an_unusual_config(change: dict[str, Any]) -> None:
    config = config_of(("LlamaForCausalLM", "llama"))
    stored = shapes(config)
    assert known_linears(config, stored) is not None
    assert known_linears(config | change, stored) is None


@pytest.mark.parametrize("heads", [5, 0, "four"])
def test_a_model_that_transformers_does_not_build_is_refused_before_it_is_converted(
    tmp_path: Path, heads: object
) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_checkpoint(), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_attention_heads": heads}))
    options = ConvertOptions(method="unit", format="e4m3fn", layout="compressed-tensors")
    with pytest.raises(UnsupportedError, match=r"open|built"):
        convert(str(source), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_nothing_is_known_of_other_matrices() -> None:
    config = config_of(("LlamaForCausalLM", "llama"))
    stored = shapes(config)
    assert known_linears(config, stored | {"model.layers.0.bias": (5,)}) is not None
    assert known_linears(config, stored | {"model.layers.0.mlp.router.weight": (4, 32)}) is None
    assert known_linears(config, {n: s for n, s in stored.items() if "embed" not in n}) is None
    assert known_linears(config, {f"base.{n}": s for n, s in stored.items()}) is None


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    known = known_shapes(config)
    assert known is not None
    return known
