"""Random models of two layers, of families that store their linear layers differently."""

from typing import Any

import torch
import transformers

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(0))
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, intermediate_size=192, tie_word_embeddings=True)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=96)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, intermediate_size=96, num_key_value_heads=2, num_local_experts=3)
    ),
}
