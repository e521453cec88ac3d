"""One-layer models of the families that the export tests run, with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["tiny"]

_SIZES: dict[str, Any] = {"vocab_size": 272}
_MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            **_SIZES, num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**_SIZES, n_layer=1, n_embd=32, n_head=2, n_positions=64)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **_SIZES, num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **_SIZES, num_hidden_layers=1, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **_SIZES, num_layers=1, num_decoder_layers=1, d_model=32, d_ff=64, d_kv=8, num_heads=4,
            decoder_start_token_id=0,
        )
    ),
}  # fmt: skip


def tiny(family: str, folder: Path) -> Path:
    """A checkpoint of a family, saved by transformers itself."""
    torch.manual_seed(0)
    _MODELS[family]().save_pretrained(folder)
    return folder
