"""Make the checkpoint directory that represents a GGUF file (see `view.py`).

Names, config, tokenizer and the rearrangement of tensors come from transformers' own GGUF functions. They ignore what
they do not know; here, metadata and tensors that change what llama.cpp computes are read too, or refused. Sources:
ggml-org/llama.cpp, `src/llama-model.cpp` and `convert_hf_to_gguf.py`; ggml-org/ggml, docs/gguf.md.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from lpconv.errors import InputError, UnsupportedError, first_line
from lpconv.gguf import BLOCKS, GGUF, WEIGHTS
from lpconv.progress import quiet_transformers
from lpconv.storage.header import check_not_pointer
from lpconv.storage.partfile import write_error

_RMS, _NORM, _WINDOW = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.sliding_window"
_HEADS, _LENGTH, _VALUES = "attention.head_count", "attention.key_length", "attention.value_length"
_TURNED, _ORIGINAL = "rope.dimension_count", "rope.scaling.original_context_length"
# Architectures that transformers computes like llama.cpp, and settings that it reads from no key or from another one.
_READ: Mapping[str, Mapping[str, str]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "starcoder2": {}, "stablelm": {}, "bloom": {},
    "falcon": {_NORM: "layer_norm_epsilon"}, "nemotron": {_NORM: "norm_eps"},
    "phi3": {_WINDOW: "sliding_window", _ORIGINAL: "original_max_position_embeddings"},
    "gemma2": {x: x.removeprefix("attention.") for x in (_WINDOW, "attn_logit_softcapping", "final_logit_softcapping")},
    "gemma3": {_WINDOW: "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
    "lfm2": {_RMS: "norm_eps", "shortconv.l_cache": "conv_L_cache"},
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "mamba": {f"ssm.{x}": x for x in ("conv_kernel", "state_size", "time_step_rank")}
    | {"ssm.inner_size": "intermediate_size"},
}  # fmt: skip
_NO_ROPE, _PARTIAL = ("gpt2", "bloom", "mamba"), ("phi3", "stablelm", "nemotron")
_NORMED = ("starcoder2", "stablelm", "bloom", "gpt2", "falcon", "nemotron")  # others have RMSNorm
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # the models whose attention llama.cpp scales by the model's width
# Keys of all architectures, and the only values that are read of some. Any other key is refused.
_NEEDED = {"block_count", "context_length", "embedding_length", _HEADS}
_KEYS = {
    "feed_forward_length", "vocab_size", _RMS, _NORM, "attention.head_count_kv", _LENGTH, _VALUES,
    "tensor_data_layout", "pooling_type", "use_parallel_residual", "rope.freq_base", _TURNED, "rope.scaling.type",
    "rope.scaling.factor", _ORIGINAL, "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scale_linear",
}  # fmt: skip
_ONLY = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "ssm.dt_b_c_rms": False,
         "attention.sliding_window_pattern": 6, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
         "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0}  # fmt: skip
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # of rotary frequencies
_KNOWN = f"lpconv reads {', '.join(_READ)}, but no mixtures of experts"
_AGAIN = "download the file again"


def make_view(file: Path, view: Path) -> None:
    """Make the directory `view` for a GGUF file; raises as documented at `as_directory`."""
    architecture, tensors, keys = _read(file)
    with _as_error(f"`{file}` cannot be read"):
        more = _settings(architecture, keys, tensors)
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, modeling_gguf_pytorch_utils as theirs

    with quiet_transformers(), _as_error(f"transformers cannot open `{file.name}`"):
        parsed = {"num_key_value_heads": keys[_HEADS]} | theirs.load_gguf_checkpoint(str(file))["config"] | more
        config = CONFIG_MAPPING[parsed["model_type"]].from_dict(dict(parsed))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        processor = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)(config=parsed)
        names = theirs.get_gguf_hf_weights_map(model, processor)
    shapes = {n: list(x.shape) for n, x in model.state_dict().items()}
    if others := [n for n in tensors if n not in {*names, *_FACTORS} and ".attn_rot_embd." not in n]:
        raise UnsupportedError(f"`{file}` has tensor `{others[0]}`, which lpconv does not read", hint=_KNOWN)
    table = {names[n]: _entry(t, shapes[names[n]], processor, file) for n, t in tensors.items() if n in names}
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    if missing := [n for n in shapes if n not in {*table, *tied}]:
        what = f"`{file}` has no tensor for the weight that transformers calls `{missing[0]}`"
        raise UnsupportedError(what, hint=_KNOWN)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    settings = {"quant_method": GGUF, "architecture": architecture, "settings": parsed, "tensors": table}
    try:
        view.parent.mkdir(parents=True, exist_ok=True)
        with quiet_transformers(), tempfile.TemporaryDirectory(dir=view.parent) as folder:
            made = Path(folder) / view.name
            _write(made, file, config, settings)
            os.replace(made, view)
    except OSError as e:
        if not (view / "config.json").exists():  # otherwise another process was faster
            raise write_error(e, view) from e


def _read(file: Path) -> tuple[str, dict[str, gguf.ReaderTensor], dict[str, Any]]:
    """The architecture of a GGUF file, its tensors, and the keys of its architecture.

    Raises InputError if it is damaged, UnsupportedError for types, architectures and keys that are not read.
    """
    check_not_pointer(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about overflows in damaged files
            reader = gguf.GGUFReader(file)
        unknown = sorted({t.tensor_type.name for t in reader.tensors} - BLOCKS.keys())
        said = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("tokenizer.")}
    except Exception as e:  # a damaged file raises ValueError, IndexError, OverflowError, KeyError and others
        raise InputError(f"`{file}` is not a valid GGUF file: {first_line(e):.120}", hint=_AGAIN) from e
    architecture = said.get("general.architecture")
    if not isinstance(architecture, str):
        raise InputError(f"`{file}` does not name its architecture", hint=_AGAIN)
    if reader.byte_order != "I":
        hint = "convert it with gguf's script gguf_convert_endian.py"
        raise UnsupportedError(f"`{file}` has the other byte order", hint=hint)
    if said.get("split.count", 1) != 1:
        hint = "join the parts with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and pass WHOLE.gguf"
        raise UnsupportedError(f"`{file}` is one of {said['split.count']} parts of a split GGUF file", hint=hint)
    if unknown:
        hint = "lpconv reads " + ", ".join(BLOCKS)
        raise UnsupportedError(f"`{file}` has tensors of unknown type {', '.join(unknown)}", hint=hint)
    if architecture not in _READ:
        raise UnsupportedError(f"`{file}` has a model of architecture `{architecture}`", hint=_KNOWN)
    keys = {k.removeprefix(f"{architecture}."): v for k, v in said.items() if k.startswith(f"{architecture}.")}
    needed = _NEEDED | {_NORM if architecture in _NORMED else _RMS} | ({_WINDOW} if architecture == "gemma3" else set())
    if missing := sorted(needed - keys.keys()):
        raise InputError(f"`{file}` has no `{architecture}.{missing[0]}`", hint=_AGAIN)
    for key in keys.keys() - _NEEDED - _KEYS - _READ[architecture].keys():
        if key not in _ONLY or keys[key] != _ONLY[key]:
            what = f"`{file}` has `{architecture}.{key}` {keys[key]!r:.60}, which lpconv does not read"
            raise UnsupportedError(what, hint=_KNOWN)
    return architecture, {t.name: t for t in reader.tensors}, keys


def _settings(architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of config.json that transformers does not read, with llama.cpp's values for missing keys."""
    found = {name: keys[key] for key, name in _READ[architecture].items() if key in keys}
    vocabulary = int(tensors["token_embd.weight"].shape[-1])
    found |= {"vocab_size": vocabulary, "tie_word_embeddings": "output.weight" not in tensors}
    for name, part in (("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")):
        found |= {name: True} if any(part in n for n in tensors) else {}
    if architecture in _NO_ROPE:
        return found
    width = keys["embedding_length"] // keys[_HEADS]
    size = keys.get(_LENGTH, width)
    turned = keys.get(_TURNED, size)
    is_partial = architecture in _PARTIAL
    if turned != (int(size * (turned / size)) if is_partial else size) or keys.get(_VALUES, size) != size:
        raise ValueError(f"it rotates {turned} of the {size} numbers of a key, next to {keys.get(_VALUES)} of a value")
    found["rope_scaling"] = {"rope_theta": keys.get("rope.freq_base", 10_000.0), **_scaling(keys, tensors, turned)}
    if architecture == "llama":
        found["model_type"] = "llama"  # transformers chooses another one for a model called mistral
    if is_partial:
        found["rope_scaling"]["partial_rotary_factor"] = turned / size
    if architecture in _LAYERS_27B:
        found["query_pre_attn_scalar"] = width if keys["block_count"] == _LAYERS_27B[architecture] else size
    return found if architecture == "falcon" else found | {"head_dim": size}


def _scaling(keys: Mapping[str, Any], tensors: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The kind of rotary embeddings, and settings of scaled ones."""
    kind, attention = keys.get("rope.scaling.type", "linear"), keys.get("rope.scaling.attn_factor", 1.0)
    factor = 1.0 if kind == "none" else keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    original = keys.get(_ORIGINAL, keys["context_length"])
    yarn = {"original_max_position_embeddings": original} if kind == "yarn" else {}
    names = [n for n in _FACTORS if n in tensors]
    if not names and attention == 1.0 and kind in ("none", "linear", "yarn"):
        return {"rope_type": "default"} if factor == 1.0 else {"rope_type": kind, "factor": factor, **yarn}
    if factor != 1.0 or kind == "yarn" or names not in ([_FACTORS[0]], [*_FACTORS[1:]]):
        raise ValueError(f"rotary embeddings scaled by `{kind}`, {factor}, {attention} and tensors {names}")
    factors = [gguf.dequantize(tensors[n].data, tensors[n].tensor_type) for n in names]
    llama3 = {"rope_type": "llama3", "factor": float(factors[0].max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    known = llama3_factors(llama3, keys.get("rope.freq_base", 10_000.0), size)
    if attention == 1.0 and len(names) == 1 and np.allclose(factors[0], known, rtol=1e-5):
        return llama3
    return {"rope_type": "longrope", "factor": 1.0, "attention_factor": attention,
            "original_max_position_embeddings": original, "short_factor": factors[0].tolist(),
            "long_factor": factors[-1].tolist()}  # fmt: skip


def llama3_factors(rope: Mapping[str, Any], theta: float, size: int) -> np.ndarray:
    """By what Llama 3 divides the frequencies of the pairs of a head of `size` numbers, fp32."""
    turns = rope["original_max_position_embeddings"] * theta ** -(np.arange(0, size, 2) / size) / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    factors: np.ndarray = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors.astype(np.float32)


@contextmanager
def _as_error(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # unexpected metadata raise any exception, of transformers too
        raise UnsupportedError(f"{what}: {first_line(e):.160}", hint=_KNOWN) from e


def _entry(t: Any, shape: list[int], processor: Any, file: Path) -> dict[str, Any]:
    """Position, type and shape of a tensor in the file, and whether its values are processed after decoding."""
    stored = [int(n) for n in reversed(t.shape)]
    size, num_bytes = BLOCKS[t.tensor_type.name]
    count = math.prod(stored)
    end = int(t.data_offset) + count // size * num_bytes
    if len(stored) > 2:
        raise UnsupportedError(f"`{t.name}` contains several matrices, like a layer of experts", hint=_KNOWN)
    if count != math.prod(shape) or stored[-1] % size or end > file.stat().st_size:
        raise InputError(f"`{t.name}` has shape {stored}, but the model's weight has {shape}", hint=_AGAIN)
    return {
        "name": t.name, "type": t.tensor_type.name, "stored": stored, "shape": shape,
        "processed": _is_processed(processor, t.name),
        "begin": int(t.data_offset), "end": end,
    }  # fmt: skip


def _is_processed(processor: Any, name: str) -> bool:
    """Whether transformers changes the values of a tensor: the processor returns something else, or fails."""
    unseen = object()  # in place of the values
    try:
        return processor.process(weights=unseen, name=name).weights is not unseen
    except Exception:  # the processor tried to use the values
        return True


def _write(folder: Path, file: Path, config: Any, settings: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    config.save_pretrained(folder)  # makes it
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    document["quantization_config"] = settings
    text = json.dumps(document, default=lambda x: x.tolist())
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / WEIGHTS).symlink_to(file)
    with suppress(Exception):  # models without a tokenizer are valid
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        tokenizer.save_pretrained(folder)
