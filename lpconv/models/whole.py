"""Check that the files of a checkpoint hold the model of its config: every weight in the right shape.

transformers fills gaps with random numbers. So names and shapes are compared before anything is read: transformers
loads tensors without data into a model without memory, with its own renaming, merging, tying and exceptions.

Tensors and `Linear` modules of decoder families are known by name without transformers, whose import takes seconds:
refusals and dry runs of these models stay below half a second. Every layer has the same modules, whatever else the
config says. A test compares each family with the model that transformers builds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lpconv.errors import InputError, UnsupportedError
from lpconv.layouts.linears import LinearModules
from lpconv.layouts.reader import stored_shapes
from lpconv.report.numbers import code_list, plural
from lpconv.storage.checkpoint import Checkpoint

Shapes = Mapping[str, tuple[int, ...]]
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


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Differences between the files and the model: names, and shapes as (stored, expected).

    `extra` are tensors in the model's layers that it does not have, which means that config.json describes another
    model. `unused` are tensors outside the layers, such as heads for other tasks, and buffers of earlier releases,
    which sound checkpoints have too. `is_bare`: config.json names no class, so the model has no head. `error` is
    transformers' message if it cannot combine the tensors.
    """

    model: str = ""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    error: str | None = None
    is_bare: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        problems, what = [], f"`{self.model}`, the model of config.json"
        if self.missing:
            problems.append(
                f"the files lack {plural(len(self.missing), 'weight')} of {what}: {code_list(self.missing)}"
            )
        if self.extra:
            problems.append(f"{what}, has no {code_list(self.extra)} in its layers")
        for name, (stored, expected) in list(self.shapes.items())[:1]:
            count = plural(len(self.shapes), "weight")
            problems.append(f"{count} with a shape that differs from config.json: `{name}` is {stored}, not {expected}")
        if self.error is not None and not problems:
            problems.append(f"{what}, cannot be built from these tensors: {self.error}")
        return tuple(problems)

    @property
    def warnings(self) -> tuple[str, ...]:
        why = "because config.json names no architectures, transformers opens" if self.is_bare else "the model is"
        return (f"{why} `{self.model}`, which does not use {code_list(self.unused)}",) if self.unused else ()


def check_complete(checkpoint: Checkpoint, shapes: Shapes | None = None, *, allow_missing: bool) -> Fit:
    """Compare the files with the model that config.json describes; without differences if transformers has none.

    `shapes` defaults to `stored_shapes`, whose errors are raised too. Raises InputError for missing and extra weights
    unless `allow_missing`, and always for wrong shapes.
    """
    shapes = stored_shapes(checkpoint) if shapes is None else shapes
    try:
        fit = compare_with_model(checkpoint, shapes)
    except UnsupportedError:
        return Fit()
    if fit.shapes or (fit.problems and not allow_missing):
        go_on = "" if fit.shapes else "; or pass --allow-missing to continue"
        raise InputError(
            "; ".join(fit.problems),
            hint=f"download the files again, or the config.json that belongs to them{go_on}",
            details={"missing": list(fit.missing), "extra": list(fit.extra), "shapes": list(fit.shapes)},
        )
    return fit


def compare_with_model(checkpoint: Checkpoint, shapes: Shapes) -> Fit:
    """Compare the stored tensors with the model that config.json describes."""
    if (fit := _compare_with_family(checkpoint.config, shapes)) is not None:
        return fit
    if "model_type" not in checkpoint.config:
        raise UnsupportedError(
            "config.json names no model_type", hint="add it, so that names and shapes can be checked"
        )
    from lpconv.models.empty import compare_empty  # transformers takes seconds to import

    return Fit(**compare_empty(checkpoint, shapes))


def _compare_with_family(config: Mapping[str, Any], shapes: Shapes) -> Fit | None:
    """The comparison with the model of a known family.

    None if the family is unknown, has none of some tensors, or lacks a table that may be tied to another.
    """
    known = known_shapes(config)
    if known is None or shapes.keys() - known.keys():
        return None
    is_tied = config.get("tie_word_embeddings") is True
    missing = known.keys() - shapes.keys() - ({_HEAD} if is_tied else set())
    wrong = {n: (shape, known[n]) for n, shape in sorted(shapes.items()) if shape != known[n]}
    if {_EMBEDDING, _HEAD} & (missing | wrong.keys()):
        return None
    return Fit(model=config["architectures"][0], missing=tuple(sorted(missing)), shapes=wrong)


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
    tables, family = frozenset((_EMBEDDING.removesuffix(".weight"),)), str(config["model_type"])
    return LinearModules(plain=tuple(names), others=(), tables=tables, family=family)
