"""Which modules are linear, which is the head, which embed ids; and that a conversion, which sees names, agrees."""

import pytest
import torch
import transformers
from torch import nn

from lpconv.layers import embeddings, head, linears, weighted_modules
from lpconv.models.presets import PRESETS
from lpconv.plan.options import ConvertOptions
from lpconv.plan.policy import decide
from lpconv.plan.settings import fill_options
from lpconv.storage.header import TensorInfo

TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96}


def on_meta(config: transformers.PreTrainedConfig, cls: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, cls)(config)
    return model


def test_gpt2_has_linears_that_store_the_transpose() -> None:
    model = on_meta(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2), "GPT2LMHeadModel")
    found = {x.name.rpartition(".")[2]: (x.kind, x.out_features, x.in_features) for x in linears(model)}
    assert found["c_attn"] == ("Conv1D", 96, 32)
    assert found["lm_head"] == ("Linear", 50257, 32)
    assert all(x.is_replaceable for x in linears(model))


def test_experts_that_share_a_parameter_are_linears_and_no_module_to_replace() -> None:
    config = transformers.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=3)
    found = {x.parameter: x for x in linears(on_meta(config, "MixtralForCausalLM")) if x.kind == "experts"}
    assert {n: (x.out_features, x.in_features) for n, x in found.items()} == {
        "gate_up_proj": (96, 32),
        "down_proj": (32, 48),
    }
    assert not any(x.is_replaceable for x in found.values())


def test_a_derived_class_is_linear_and_not_plain() -> None:
    class Doubled(nn.Linear):
        pass

    (layer,) = linears(nn.Sequential(Doubled(4, 2)))
    assert (layer.name, layer.out_features, layer.in_features, layer.is_plain) == ("0", 2, 4, False)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        ("BertForMaskedLM", "cls.predictions.decoder"),
        ("BertForSequenceClassification", "classifier"),
        ("BertModel", None),
        ("LlamaForCausalLM", "lm_head"),
        ("LlamaForSequenceClassification", "score"),
        ("LlamaModel", None),
    ],
)
def test_the_head_is_what_stands_outside_of_the_base_model(cls: str, name: str | None) -> None:
    model = on_meta(getattr(transformers, f"{cls[: 4 if cls[0] == 'B' else 5]}Config")(**TINY), cls)
    assert head(model) is (None if name is None else model.get_submodule(name))


def test_a_module_without_a_base_model_has_no_head() -> None:
    assert head(nn.Sequential(nn.Linear(4, 4))) is None


def test_weights_of_any_kind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4), nn.GELU())
    assert list(weighted_modules(model)) == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["bert-base", "roberta-base", "gpt2", "opt-125m", "pythia-160m", "llama-1b"])
def test_a_conversion_knows_heads_and_embeddings_by_the_names_of_their_weights(name: str) -> None:
    """It sees names only. A dense layer that BERT and RoBERTa have before their output goes with the head."""
    preset = PRESETS[name]
    model = on_meta(getattr(transformers, preset.config_class)(**preset.settings), preset.model_class)
    kept = head(model)
    assert kept is not None
    special = {id(kept.weight)} | {id(m.weight) for m in embeddings(model).values()}
    inside = {id(p) for p in model.base_model.parameters()}  # type: ignore[union-attr]  # of transformers
    options = fill_options(ConvertOptions(format="e4m3fn"))
    for stored, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim == 2:
            info = TensorInfo(name=stored, dtype="F32", shape=tuple(parameter.shape), begin=0, end=0)
            by_name = "16 bits" in decide(info, options)[1]
            assert by_name == (id(parameter) in special or id(parameter) not in inside), stored


STATES = {"mixer.A_log", "mixer.dt_proj.weight", "mixer.conv1d.weight"}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("cls", "settings", "left"),
    [
        ("MixtralForCausalLM", {**TINY, "num_local_experts": 4}, {"mlp.gate.weight"}),
        ("GraniteMoeForCausalLM", {**TINY, "num_local_experts": 4}, {"block_sparse_moe.router.weight"}),
        ("LlamaForCausalLM", TINY, set()),
        ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96}, STATES),
        (
            "GptOssForCausalLM",
            {**TINY, "num_local_experts": 4, "head_dim": 8},
            {"mlp.router.weight", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"},
        ),
        (
            "Qwen3NextForCausalLM",
            {**TINY, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
            {"mlp.gate.weight", "mlp.shared_expert_gate.weight", "linear_attn.in_proj_ba.weight",
             "linear_attn.conv1d.weight"},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_conversion_leaves_what_decides_much_in_16_bits(
    cls: str, settings: dict[str, object], left: set[str], dtype: str
) -> None:
    model = on_meta(getattr(transformers, cls).config_class(**settings), cls)
    found = {}
    for name, p in model.named_parameters():
        info = TensorInfo(name=name, dtype=dtype, shape=tuple(p.shape), begin=0, end=0)
        form, reason = decide(info, fill_options(ConvertOptions(format="e4m3fn")))
        if ".layers." in name and "16 bits" in reason:
            found[name.split(".", 3)[-1]] = form.format.name if form.format else dtype
    assert found == dict.fromkeys(left, "fp16" if dtype == "F32" else dtype)
