"""GGUF files of a random one-layer model with a tensor of each type, and of any small model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from lpconv.data import demo_checkpoint
from lpconv.gguf import BLOCKS

__all__ = ["SIZE", "TYPES", "add_keys", "demo_with_merges", "model_as_gguf", "rewrite_as_gguf", "write_gguf"]

SIZE, VOCAB, HEADS, KV = 256, 64, 4, 2
# One tensor of each type, q and k among them, whose rows llama.cpp reorders.
TYPES = {
    "attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q6_K", "attn_output": "Q5_K", "ffn_gate": "Q4_0", "ffn_up": "Q5_1",
    "ffn_down": "Q5_0", "token_embd": "Q4_1", "output": "F16",
}  # fmt: skip
# Where a block has its scales in fp16, by byte.
SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,)}  # fmt: skip


NORMS, BIASES = {"gemma2": ("post_attention_norm", "post_ffw_norm")}, {"qwen2": ("attn_q", "attn_k", "attn_v")}


def blocks(kind: str, rows: int, cols: int, rng: np.random.Generator) -> Any:
    """Random codes with scales near a hundredth; plain numbers of that size for plain types."""
    if kind not in SCALES:
        x = rng.normal(size=(rows, cols), scale=0.1)
        return x if kind == "F64" else gguf.quantize(x.astype(np.float32), gguf.GGMLQuantizationType[kind])
    size, num_bytes = BLOCKS[kind]
    raw = rng.integers(0, 256, (rows, cols // size, num_bytes), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.uniform(1e-3, 1e-2, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def write_gguf(folder: Path, architecture: str = "llama", types: dict[str, str] = TYPES, **changed: Any) -> Path:
    """A model of one layer. `changed` replaces metadata and sizes of tensors, or leaves out what is None."""
    folder.mkdir(parents=True, exist_ok=True)
    writer, rng = gguf.GGUFWriter(folder / "model.gguf", architecture), np.random.default_rng(0)
    numbers = {
        "block_count": 1, "context_length": 128, "embedding_length": SIZE, "feed_forward_length": SIZE,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "vocab_size": VOCAB,
        "attention.key_length": SIZE // HEADS, "attention.value_length": SIZE // HEADS,
    }  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    rows = {"token_embd": VOCAB, "output": VOCAB, "attn_k": SIZE * KV // HEADS, "attn_v": SIZE * KV // HEADS}
    vectors = {f"{n}.weight": SIZE for n in ("output_norm", "attn_norm", "ffn_norm", *NORMS.get(architecture, ()))}
    vectors |= {f"{n}.bias": rows.get(n, SIZE) for n in BIASES.get(architecture, ())}
    for name, kind in types.items():
        if (count := changed.get(name, rows.get(name, SIZE))) is not None:
            raw_dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(_full(name) + ".weight", blocks(kind, count, SIZE, rng), raw_dtype=raw_dtype)
    for name, size in vectors.items():
        writer.add_tensor(_full(name), rng.normal(size=size).astype(np.float32))
    return _written(writer, folder)


def demo_with_merges(folder: Path) -> Path:
    """The demo model with a tokenizer that splits text as llama.cpp does, and has a merge."""
    shutil.copytree(demo_checkpoint(), folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"]["use_regex"] = True
    del document["model"]["vocab"]["ÿ"]
    document["model"] |= {"vocab": document["model"]["vocab"] | {"th": 255}, "merges": [["t", "h"]]}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def rewrite_as_gguf(plain: Path, folder: Path) -> Path:
    """A Llama with tied embeddings and a tokenizer of bytes, its matrices in Q8_0."""
    folder.mkdir(parents=True)
    writer, config = gguf.GGUFWriter(folder / "model.gguf", "llama"), json.loads((plain / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    numbers = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": kv, "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["head_dim"],
    }  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    _add_tokenizer(writer, plain, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, x in load_file(plain / "model.safetensors").items():
        full = names.get_name(name, try_suffixes=(".weight",))
        for part, num_heads in (("q_proj", heads), ("k_proj", kv)):
            if part in name:  # llama.cpp's order of the two halves of a head
                x = x.view(num_heads, 2, -1, x.shape[-1]).transpose(1, 2).reshape(x.shape)
        kind = gguf.GGMLQuantizationType["Q8_0" if x.dim() > 1 else "F32"]
        writer.add_tensor(full, gguf.quantize(x.to(torch.float32).numpy(), kind), raw_dtype=kind)
    return _written(writer, folder)


def _add_tokenizer(writer: Any, plain: Path, size: int) -> None:
    found = json.loads((plain / "tokenizer.json").read_text())
    special = {t["content"]: t["id"] for t in found["added_tokens"]}
    ids = {i: token for token, i in (found["model"]["vocab"] | special).items()}
    ids[size - 1] = "Ġt"  # transformers wants a merge
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([ids.get(i, f"<unused{i}>") for i in range(size)])
    writer.add_token_types([3 if i in special.values() or i not in ids else 1 for i in range(size)])
    writer.add_token_merges(["Ġ t"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(next(iter(special.values())))


def _written(writer: Any, folder: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def _full(name: str) -> str:
    return name if name.startswith(("token_embd", "output")) else f"blk.0.{name}"


def add_keys(writer: Any, keys: dict[str, Any]) -> None:
    """Add metadata with the types of the values."""
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)


def model_as_gguf(
    model: Any, folder: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, Any] | None = None
) -> Path:
    """A model of transformers in fp32, in llama.cpp's order and with its offsets (`convert_hf_to_gguf.py`)."""
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    add_keys(writer, {k if "." in k and k.split(".")[0] in FREE else f"{architecture}.{k}": v for k, v in keys.items()})
    number = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, keys["block_count"])
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
    for name, x in model.state_dict().items():
        if name not in tied:
            found = (table.get_name(n, try_suffixes=(".weight", ".bias")) for n in (name, name.partition(".")[2]))
            full = next(n for n in found if n is not None)
            writer.add_tensor(full, _rearranged(x, name, architecture, model.config).float().contiguous().numpy())
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(numbers, np.float32))
    return _written(writer, folder)


FREE = ("general", "tokenizer", "split", "quantize", "mradermacher")


def _rearranged(x: torch.Tensor, name: str, architecture: str, config: Any) -> torch.Tensor:
    if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
    if architecture == "bloom" and "query_key_value" in name:
        return x.view(config.n_head, 3, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return x.t()
    if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return x + 1
    if name.endswith("A_log"):
        return -x.exp()
    return x.squeeze(1) if "conv" in name and x.dim() == 3 else x
