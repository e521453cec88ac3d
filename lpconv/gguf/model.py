"""The GGUF file of a model: names, order and types of its tensors, and its metadata, for the families in `_FAMILIES`.

Names, keys and the encoding of the header come from the package gguf; which values llama.cpp expects is written down
here. Sources: ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `src/llama-model.cpp`; ggml-org/ggml, docs/gguf.md.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.gguf_writer import WriterState

from lpconv.errors import InputError, UnsupportedError, typed_line
from lpconv.gguf.arranged import TRANSPOSED, rotary
from lpconv.gguf.read import llama3_factors
from lpconv.gguf.vocabulary import add_vocabulary
from lpconv.models.whole import compare_with_model
from lpconv.report.numbers import code_list
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import read_json

_ORIGINAL = "original_max_position_embeddings"
# Numbers in config.json; the first ones are counts.
_COUNTS = {
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size",
    "intermediate_size", "num_hidden_layers", "n_positions", "n_head", "n_embd", "n_inner", "n_layer",
    "type_vocab_size", _ORIGINAL,
}  # fmt: skip
_NUMBERS = {"rope_theta", "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "factor", "low_freq_factor",
            "high_freq_factor", *_COUNTS}  # fmt: skip
_LIKE_LLAMA = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A family that llama.cpp knows as `architecture`.

    `needs` are settings of config.json with the only values that llama.cpp computes; a missing setting has the first
    one. `defaults` are the family's other settings that config.json may lack. `hidden` matches the names of tensors
    that llama.cpp does not read.
    """

    architecture: gguf.MODEL_ARCH
    describe: Callable[[gguf.GGUFWriter, Mapping[str, Any]], None]
    needs: Mapping[str, tuple[Any, ...]]
    defaults: Mapping[str, Any]
    hidden: re.Pattern[str] = _LIKE_LLAMA


def _decoder(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Sizes of a Llama or Qwen."""
    heads = config["num_attention_heads"]
    size, rope = _head_size(config), _rope(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] in _SCALED:
        writer.add_rope_scaling_type(_SCALED[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope[_ORIGINAL])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_sizes(writer, config, "num_hidden_layers", "hidden_size", config["intermediate_size"])


def _head_size(config: Mapping[str, Any]) -> int:
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary embeddings, found in the same order as by transformers (`modeling_rope_utils.py`)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        what = f"config.json has the rotary embeddings {rope!r:.80}"
        raise UnsupportedError(what, hint="layout `gguf` needs one table for all layers; or use another --layout")
    usual = {"rope_theta": config.get("rope_theta", 10_000.0), _ORIGINAL: config.get("max_position_embeddings"),
             "rope_type": rope.get("type", "default")}  # fmt: skip
    return _checked({**usual, **rope, **{key: config[key] for key in (_ORIGINAL,) if key in config}})


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without numbers that are null. Raises InputError for what is no number, or none that a model has."""
    for key in _NUMBERS & settings.keys():
        value, types = settings[key], (int,) if key in _COUNTS else (int, float)
        if value is not None and not (type(value) in types and 0 < value < (2**31 if key in _COUNTS else 1e38)):
            what = f"config.json has {key} {value!r:.60}, not a positive {'integer' if key in _COUNTS else 'number'}"
            raise InputError(what, hint="correct it, or download the checkpoint again")
    return {key: value for key, value in settings.items() if value is not None or key not in _NUMBERS}


def _gpt2(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    _add_sizes(writer, config, "n_layer", "n_embd", config.get("n_inner") or 4 * config["n_embd"])


def _bert(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_token_type_count(config["type_vocab_size"])
    _add_sizes(writer, config, "num_hidden_layers", "hidden_size", config["intermediate_size"])


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any], layers: str, width: str, inner: int) -> None:
    writer.add_block_count(config[layers])
    writer.add_embedding_length(config[width])
    writer.add_feed_forward_length(inner)
    writer.add_vocab_size(config["vocab_size"])


# Scaled rotary embeddings of all decoders. Llama 3's need `_ROPE_FACTORS`, which llama.cpp reads for Llamas alone.
_SCALED = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
_ROPE_FACTORS = "rope_freqs.weight"
# What llama.cpp computes of YaRN, with the defaults of transformers.
_YARN = {"attention_factor": None, "beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None,
         "truncate": True}  # fmt: skip
_SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "rope_type": ("default", *_SCALED),
                                        "partial_rotary_factor": (1.0, None)}  # fmt: skip
_LLAMA = {**_SILU, "rope_type": (*_SILU["rope_type"], "llama3")}
_QWEN = {**_SILU, "use_sliding_window": (False,)}
_SIZES = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_FAMILIES = {
    "LlamaForCausalLM": _Family(architecture=gguf.MODEL_ARCH.LLAMA, describe=_decoder, needs=_LLAMA, defaults=_SIZES),
    "MistralForCausalLM": _Family(
        architecture=gguf.MODEL_ARCH.LLAMA,
        describe=_decoder,
        needs={**_LLAMA, "sliding_window": (None,)},
        defaults={**_SIZES, "sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": _Family(architecture=gguf.MODEL_ARCH.QWEN2, describe=_decoder, needs=_QWEN, defaults=_SIZES),
    "Qwen3ForCausalLM": _Family(architecture=gguf.MODEL_ARCH.QWEN3, describe=_decoder, needs=_QWEN, defaults=_SIZES),
    "GPT2LMHeadModel": _Family(
        architecture=gguf.MODEL_ARCH.GPT2,
        describe=_gpt2,
        needs={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
               "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5},
        hidden=re.compile(r"(^|\.)attn\.(masked_)?bias$"),
    ),
    "BertModel": _Family(
        architecture=gguf.MODEL_ARCH.BERT,
        describe=_bert,
        needs={"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
        defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2},
        hidden=re.compile(r"(^|\.)(embeddings\.position_ids|pooler\.dense\.(weight|bias))$"),
    ),
}  # fmt: skip
_ROTARY = re.compile(r"\.(q|k)_proj\.(weight|bias)$")
_CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
_IN_FULL = re.compile(r"^(position_embd|token_types)\.weight$")  # fp32, as llama.cpp's own conversion leaves them
_FILE_TYPES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "int8": "MOSTLY_Q8_0",
               "int4": "MOSTLY_Q4_0", "e2m1": "MOSTLY_MXFP4_MOE"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """The model of a checkpoint as llama.cpp sees it.

    `names` are the names in GGUF of all tensors that it stores, `orders` the orders of elements that differ from the
    checkpoint's, `in_full` the matrices that are stored in fp32, and `hidden` the tensors that it does not store.
    """

    names: Mapping[str, str]
    orders: Mapping[str, str]
    in_full: frozenset[str]
    hidden: frozenset[str]
    family: _Family
    directory: Path
    config: Mapping[str, Any]

    def header(self, tensors: Sequence[tuple[str, str, tuple[int, ...]]], format: str) -> bytes:
        """The bytes before the data of `tensors`: (name in the checkpoint, type, shape in bytes), in file order.

        Tensors that no checkpoint has are part of them.
        """
        architecture = gguf.MODEL_ARCH_NAMES[self.family.architecture]
        writer = gguf.GGUFWriter(None, architecture)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[format]])
        rope, factors = _rope(self.config), np.zeros(0, np.float32)
        try:
            self.family.describe(writer, self.config)
            if rope["rope_type"] == "llama3":
                factors = llama3_factors(rope, rope["rope_theta"], _head_size(self.config))
        except KeyError as e:
            raise UnsupportedError(f"config.json does not say {e}", hint="download it again") from e
        if self.family.architecture is gguf.MODEL_ARCH.BERT:
            writer.add_pooling_type(_pooling(self.directory))
        try:
            add_vocabulary(writer, self.directory, self.config)
        except (AttributeError, LookupError, TypeError, ValueError) as e:
            what = f"`{self.directory}` has an invalid tokenizer.json or tokenizer_config.json: {typed_line(e)}"
            raise InputError(what, hint="save the tokenizer again with transformers' AutoTokenizer") from e
        if factors.size:
            writer.add_tensor_info(_ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for name, kind, shape in tensors:
            raw_dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(
                self.names[name], shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=raw_dtype
            )
        out: Any = io.BytesIO()  # only written to
        writer.fout, writer.state = [out], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return _padded(_padded(out.getvalue()) + factors.tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % gguf.GGUF_DEFAULT_ALIGNMENT)


def gguf_model(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> GgufModel:
    """The model of a checkpoint with tensors of these shapes.

    Raises UnsupportedError for families, settings, tensors and tokenizers that are not mapped.
    """
    family = _family(checkpoint.config)
    config = _checked({**family.defaults, **checkpoint.config})
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if layers is None:
        raise UnsupportedError("config.json does not say how many layers the model has", hint="download it again")
    table = gguf.get_tensor_name_map(family.architecture, layers)
    hidden = frozenset(n for n in shapes if family.hidden.search(n))
    found = {n: table.get_name(n.removeprefix("bert."), try_suffixes=(".weight", ".bias")) for n in shapes}
    names = {n: name for n, name in found.items() if name is not None and n not in hidden}
    unknown = shapes.keys() - names.keys() - hidden
    if unknown:
        raise UnsupportedError(
            f"{code_list(sorted(unknown))}: llama.cpp has no such tensor in its {family.architecture.name} models",
            hint="use another --layout",
        )
    model = GgufModel(
        names=names,
        orders=dict(_orders(names, family, config)),
        in_full=frozenset(n for n, name in names.items() if len(shapes[n]) < 2 or _IN_FULL.search(name)),
        hidden=hidden,
        family=family,
        directory=checkpoint.directory,
        config=config,
    )
    model.header([], "fp32")  # raises its errors now
    compare_with_model(checkpoint, shapes)  # raises an error if the sizes in config.json do not make a model
    return model


def _pooling(directory: Path) -> gguf.PoolingType:
    """How sentence-transformers pools the outputs of an encoder."""
    path = directory / "1_Pooling" / "config.json"
    modes = read_json(path) if path.is_file() else {}
    known = {"pooling_mode_mean_tokens": gguf.PoolingType.MEAN, "pooling_mode_cls_token": gguf.PoolingType.CLS}
    return next((pooling for mode, pooling in known.items() if modes.get(mode)), gguf.PoolingType.NONE)


def _family(config: Mapping[str, Any]) -> _Family:
    named = next(iter(config.get("architectures") or ()), "no class")
    family = _FAMILIES.get(named)
    if family is None:
        raise UnsupportedError(
            f"layout `gguf` does not know `{named}`", hint=f"it writes {', '.join(_FAMILIES)}; or use another --layout"
        )
    rope, needs = _rope(config), dict(family.needs)
    if rope["rope_type"] == "yarn":
        needs |= {key: (default,) for key, default in _YARN.items()}
    settings = {**family.defaults, **config, **rope}
    for key, values in needs.items():
        if settings.get(key, values[0]) not in values:
            raise UnsupportedError(
                f"config.json has {key} {settings[key]!r}, which layout `gguf` cannot express for {named}",
                hint=f"it needs {' or '.join(map(repr, values))}; or use another --layout",
            )
    return family


def _orders(names: Mapping[str, str], family: _Family, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    if family.architecture is gguf.MODEL_ARCH.GPT2:
        return [(n, TRANSPOSED) for n in names if _CONV1D.search(n)]
    if family.architecture is not gguf.MODEL_ARCH.LLAMA:
        return []
    heads = {
        "q": config.get("num_attention_heads", 1),
        "k": config.get("num_key_value_heads") or config.get("num_attention_heads", 1),
    }
    return [(n, rotary(heads[m[1]])) for n in names if (m := _ROTARY.search(n))]
