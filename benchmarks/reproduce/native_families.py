"""Sizes at initialisation under native unit scaling, for families of architectures beyond BERT, GPT-2 and Llama.

    python benchmarks/reproduce/native_families.py --out benchmarks/results/native/families [--seeds 3] [--only gemma3]

12 layers of width 128 on 8 rows of 64 random tokens (ViT: 8 images), as in native.py: the share of outputs, gradients
and weight gradients whose data have a root mean square within [1/2, 2]. Tokens leave out the ids 0 to 2: a padding id
has an embedding of zero, where norms are steep.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from native import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, Share, shares, sizes_table, write
from torch import Tensor, nn

from lpconv.errors import UnsupportedError
from lpconv.scaled import native

SPECIAL = 3  # ids that are not drawn
CLASSES, IMAGE, PATCH = 100, 32, 4

SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"intermediate_size": 4 * WIDTH}
GATED = {"intermediate_size": 8 * WIDTH // 3 // 16 * 16}
GROUPED = {"num_key_value_heads": HEADS // 2}
GEMMA = {**GROUPED, "head_dim": WIDTH // HEADS}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPTJ = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH,
        "rotary_dim": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
OPT = {**TEXT, "ffn_dim": 4 * WIDTH, "max_position_embeddings": LENGTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
               "attention_multiplier": HEADS / WIDTH}  # fmt: skip

# Class of model, class of config, its settings; the first eight are those that were found wanting.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**TEXT, **GATED, **GEMMA, "query_pre_attn_scalar": 32}),
    "vit": ("ViTForImageClassification", "ViTConfig",
            {**SIZES, **WIDE, **QUIET, "image_size": IMAGE, "patch_size": PATCH, "num_labels": CLASSES}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**TEXT, **GATED, **MULTIPLIERS}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**TEXT, **GATED}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPTJ, "bos_token_id": 1, "eos_token_id": 2}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**TEXT, **GATED}),
    "esm": ("EsmForMaskedLM", "EsmConfig",
            {**SIZES, **WIDE, **QUIET, "vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 2,
             "position_embedding_type": "rotary", "token_dropout": True}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**TEXT, **GATED, "num_key_value_heads": HEADS}),
    "bert-cls": ("BertForSequenceClassification", "BertConfig", {**TEXT, **WIDE, **QUIET, "num_labels": CLASSES}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**TEXT, **GATED, **GEMMA}),
    "llama-grouped": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, **GATED, **GROUPED}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**TEXT, **GATED, **GROUPED, "sliding_window": 16}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **WIDE}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**TEXT, **GATED}),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "phi": ("PhiForCausalLM", "PhiConfig", {**TEXT, **WIDE}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, **GATED, **GEMMA}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**TEXT, **WIDE, **GROUPED}),
}  # fmt: skip


def build(name: str, attention: str) -> nn.Module:
    model_class, config_class, settings = FAMILIES[name]
    tied = {} if name in ("vit", "cohere", "opt") or "labels" in str(settings) else {"tie_word_embeddings": False}
    implementation = {} if name == "gptj" else {"attn_implementation": attention}  # which has its own
    model: nn.Module = getattr(hf, model_class)(getattr(hf, config_class)(**settings, **tied, **implementation))
    return model


def own_loss(model: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """The loss of the model on tokens, or, for a ViT, on images and classes that are drawn anew."""

    def loss(ids: Tensor) -> Tensor:
        classes = torch.randint(0, CLASSES, (len(ids),))
        if name == "vit":
            found: Tensor = model(pixel_values=torch.randn(len(ids), 3, IMAGE, IMAGE), labels=classes).loss
            return found
        ids = SPECIAL + ids % (VOCABULARY - SPECIAL)
        found = model(input_ids=ids, labels=classes if "cls" in name else ids).loss
        return found

    return loss


def measure(names: list[str], seeds: int) -> tuple[list[Share], dict[str, str]]:
    """The shares, and why a family has none."""
    found: list[Share] = []
    refused: dict[str, str] = {}
    for seed in range(seeds):
        for attention in ("sdpa", "eager"):
            for name in names:
                torch.manual_seed(seed)
                try:
                    model = native(build(name, attention), seed=seed)
                    found += shares(f"{name}, {attention}", "native", seed, model, own_loss(model, name))
                except UnsupportedError as e:
                    refused[f"{name}, {attention}"] = str(e)
    return found, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=FAMILIES, nargs="*", default=list(FAMILIES))
    options = parser.parse_args()
    found, refused = measure(options.only, options.seeds)
    raw = {"sizes": [asdict(s) for s in found], "refused": refused}
    why = [f"{name}: refused ({reason})" for name, reason in refused.items()]
    write(options.out, {"width": WIDTH, "layers": LAYERS}, raw, [sizes_table(found), *why])


if __name__ == "__main__":
    main()
