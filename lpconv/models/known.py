"""`Linear` modules of decoder families, known by name without transformers, whose import takes seconds.

Every layer of these models has the same modules, whatever else the config says, and all other matrices are the
embedding. A test compares each family with the model that transformers builds.
"""

from collections.abc import Mapping
from typing import Any

from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.compressed import LinearModules

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_QKVO = tuple(f"self_attn.{x}_proj" for x in "qkvo")
_GATED = (*_QKVO, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_UNGATED = (*_QKVO, "mlp.up_proj", "mlp.down_proj")
_MERGED = (*_QKVO, "mlp.gate_up_proj", "mlp.down_proj")

# The modules of one layer, in the order of the model, by class and `model_type` of config.json.
FAMILIES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("ArceeForCausalLM", "arcee"): _UNGATED,
    ("Cohere2ForCausalLM", "cohere2"): _GATED,
    ("CohereForCausalLM", "cohere"): _GATED,
    ("Ernie4_5ForCausalLM", "ernie4_5"): _GATED,
    ("Exaone4ForCausalLM", "exaone4"): _GATED,
    ("Gemma2ForCausalLM", "gemma2"): _GATED,
    ("Gemma3ForCausalLM", "gemma3_text"): _GATED,
    ("GemmaForCausalLM", "gemma"): _GATED,
    ("Glm4ForCausalLM", "glm4"): _MERGED,
    ("GlmForCausalLM", "glm"): _MERGED,
    ("GraniteForCausalLM", "granite"): _GATED,
    ("HeliumForCausalLM", "helium"): _GATED,
    ("LlamaForCausalLM", "llama"): _GATED,
    ("Ministral3ForCausalLM", "ministral3"): _GATED,
    ("MistralForCausalLM", "mistral"): _GATED,
    ("Olmo2ForCausalLM", "olmo2"): _GATED,
    ("Olmo3ForCausalLM", "olmo3"): _GATED,
    ("OlmoForCausalLM", "olmo"): _GATED,
    ("Phi3ForCausalLM", "phi3"): ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    ("PhiForCausalLM", "phi"): (*_QKVO[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
    ("Qwen2ForCausalLM", "qwen2"): _GATED,
    ("Qwen3ForCausalLM", "qwen3"): _GATED,
    ("SeedOssForCausalLM", "seed_oss"): _GATED,
    ("SmolLM3ForCausalLM", "smollm3"): _GATED,
    ("StableLmForCausalLM", "stablelm"): _GATED,
    ("Starcoder2ForCausalLM", "starcoder2"): (*_QKVO, "mlp.c_fc", "mlp.c_proj"),
}

# Norms of a layer by `model_type`, for families whose shapes are known as well. Without `head_dim` in config.json,
# only families in `_USUAL_HEADS` divide the width among heads.
_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
_NORMS = {
    **dict.fromkeys(("gemma", "granite", "llama", "ministral3", "mistral", "qwen2", "smollm3"), _TWO),
    "gemma2": _FOUR, "gemma3_text": (*_OF_HEADS, *_FOUR), "qwen3": (*_OF_HEADS, *_TWO),
}  # fmt: skip
_USUAL_HEADS = ("granite", "llama", "mistral", "qwen2", "smollm3")
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
          "num_hidden_layers")  # fmt: skip


def known_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of all tensors of the model that a config describes, by name, including the head; None if unknown."""
    kind, sizes = str(config.get("model_type")), [config.get(k) for k in _SIZES]
    layer = FAMILIES.get(((config.get("architectures") or [""])[0], kind))
    is_usual = _has_whole_heads(config) and not any(v for k, v in config.items() if "bias" in k)
    if layer is None or kind not in _NORMS or not is_usual or not all(isinstance(n, int) for n in sizes):
        return None
    width, num_heads, num_pairs, inner, vocab, count = (int(n) for n in sizes if n is not None)
    head = config.get("head_dim", width // num_heads if kind in _USUAL_HEADS else None)
    if not isinstance(head, int):
        return None
    rows = {"q_proj": num_heads * head, "k_proj": num_pairs * head, "v_proj": num_pairs * head, "o_proj": width,
            "gate_proj": inner, "up_proj": inner, "down_proj": width}  # fmt: skip
    cols = {"o_proj": num_heads * head, "down_proj": inner}
    leaves: dict[str, tuple[int, ...]] = {
        f"{m}.weight": (rows[m.rpartition(".")[2]], cols.get(m.rpartition(".")[2], width)) for m in layer
    }
    if kind == "qwen2":
        leaves |= {f"{m}.bias": (rows[m.rpartition(".")[2]],) for m in _QKVO[:3]}
    leaves |= {f"{n}.weight": (head if n in _OF_HEADS else width,) for n in _NORMS[kind]}
    ends = {_EMBEDDING: (vocab, width), _HEAD: (vocab, width), "model.norm": (width,)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in ends.items()}
    return shapes | {f"model.layers.{i}.{leaf}": shape for i in range(count) for leaf, shape in leaves.items()}


def linears_of(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> LinearModules:
    """The `Linear` modules of a checkpoint's model; builds an empty model only if the family is not a known one."""
    known = known_linears(checkpoint.config, shapes)
    if known is not None:
        return known
    from lpconv.models.empty import linear_modules  # transformers takes seconds to import

    return linear_modules(checkpoint, shapes)


def known_linears(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LinearModules | None:
    """Result of `empty.linear_modules` for a config and stored tensors, from names alone; None if these do not suffice.

    They suffice if the files hold exactly the matrices of the family. The head may be missing, as in tied models. Heads
    that do not divide the model's width evenly are unknown too: transformers may refuse to build such a model.
    """
    if {"auto_map", "quantization_config"} & config.keys():
        return None
    architectures = config.get("architectures") or [""]
    layer = FAMILIES.get((architectures[0], config.get("model_type", ""))) if len(architectures) == 1 else None
    count = config.get("num_hidden_layers")
    if layer is None or not isinstance(count, int) or not _has_whole_heads(config):
        return None
    names = (*(f"model.layers.{i}.{module}" for i in range(count) for module in layer), _HEAD)
    expected = {f"{name}.weight" for name in (*names, _EMBEDDING)}
    missing = expected ^ {name for name, shape in shapes.items() if len(shape) > 1}
    tables = frozenset((_EMBEDDING,))
    return LinearModules(plain=names, others=(), tables=tables) if missing <= {f"{_HEAD}.weight"} else None


def _has_whole_heads(config: Mapping[str, Any]) -> bool:
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0
