"""Tensors and `Linear` modules of decoder families, known by name without transformers, whose import takes seconds.

Refusals and dry runs of these models stay below half a second. Every layer has the same modules, whatever else the
config says. A test compares each family with the model that transformers builds.
"""

from collections.abc import Mapping
from typing import Any

from lpconv.layouts.linears import LinearModules
from lpconv.storage.checkpoint import Checkpoint

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
# The norms of a layer, by class and `model_type` of config.json.
FAMILIES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("Gemma2ForCausalLM", "gemma2"): _FOUR,
    ("Gemma3ForCausalLM", "gemma3_text"): (*_OF_HEADS, *_FOUR),
    ("GemmaForCausalLM", "gemma"): _TWO,
    ("GraniteForCausalLM", "granite"): _TWO,
    ("LlamaForCausalLM", "llama"): _TWO,
    ("Ministral3ForCausalLM", "ministral3"): _TWO,
    ("MistralForCausalLM", "mistral"): _TWO,
    ("Qwen2ForCausalLM", "qwen2"): _TWO,
    ("Qwen3ForCausalLM", "qwen3"): (*_OF_HEADS, *_TWO),
    ("SmolLM3ForCausalLM", "smollm3"): _TWO,
}
# Without `head_dim` in config.json, only these divide the width among heads.
_USUAL_HEADS = ("granite", "llama", "mistral", "qwen2", "smollm3")
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
          "num_hidden_layers")  # fmt: skip


def known_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of all tensors of the model that a config describes, by name, including the head; None if unknown.

    Heads that do not divide the width evenly are unknown, too: transformers may refuse to build such a model.
    """
    classes, kind = config.get("architectures") or [], str(config.get("model_type"))
    norms = FAMILIES.get((classes[0], kind)) if len(classes) == 1 else None
    sizes = [n for key in _SIZES if isinstance(n := config.get(key), int)]
    if norms is None or len(sizes) < len(_SIZES) or any(v for k, v in config.items() if "bias" in k):
        return None
    width, num_heads, num_pairs, inner, vocab, count = sizes
    if num_heads < 1 or width % num_heads:
        return None
    head = config.get("head_dim", width // num_heads if kind in _USUAL_HEADS else None)
    if not isinstance(head, int):
        return None
    rows = dict(zip(_QKV, (num_heads * head, num_pairs * head, num_pairs * head), strict=True))
    leaves: dict[str, tuple[int, ...]] = {
        **{f"{module}.weight": (n, width) for module, n in rows.items()},
        "self_attn.o_proj.weight": (width, num_heads * head),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if kind == "qwen2":
        leaves |= {f"{module}.bias": (n,) for module, n in rows.items()}
    leaves |= {f"{n}.weight": (head if n in _OF_HEADS else width,) for n in norms}
    layers = {f"model.layers.{i}.{leaf}": shape for i in range(count) for leaf, shape in leaves.items()}
    return {_EMBEDDING: (vocab, width), **layers, "model.norm.weight": (width,), _HEAD: (vocab, width)}


def linears_of(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> LinearModules:
    """The `Linear` modules of a checkpoint's model; builds an empty model only if the family is not a known one."""
    known = known_linears(checkpoint.config, shapes)
    if known is not None:
        return known
    from lpconv.models.empty import linear_modules  # transformers takes seconds to import

    return linear_modules(checkpoint, shapes)


def known_linears(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LinearModules | None:
    """Result of `empty.linear_modules` for a config and stored tensors, from names alone; None if these do not suffice.

    They suffice if the files hold exactly the matrices of the family. The head may be missing, as in tied models.
    """
    known = None if {"auto_map", "quantization_config"} & config.keys() else known_shapes(config)
    matrices = [n for n, shape in (known or {}).items() if len(shape) > 1]
    if known is None or not {*matrices} ^ {n for n, shape in shapes.items() if len(shape) > 1} <= {_HEAD}:
        return None
    names = (n.removesuffix(".weight") for n in matrices if n != _EMBEDDING)
    return LinearModules(plain=tuple(names), others=(), tables=frozenset((_EMBEDDING.removesuffix(".weight"),)))
