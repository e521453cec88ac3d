"""Writes the sections of docs/models.md, by dry runs of checkpoints that have names and shapes, but no weights."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.layouts import scale_defects
from lpconv.layouts.defects import Findings
from tests.helpers.checkpoints import raw_safetensors
from tests.helpers.gguf_files import demo_with_merges

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Published sizes, where they differ from the defaults of the config classes of transformers.
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "Llama 3": ("meta-llama/Llama-3.1-8B-Instruct", "LlamaForCausalLM", "BF16", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128}),
    "Qwen3": ("Qwen/Qwen3-8B", "Qwen3ForCausalLM", "BF16", {
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}),
    "Gemma 3": ("google/gemma-3-1b-it", "Gemma3ForCausalLM", "BF16", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 262144, "sliding_window": 512}),
    "gpt-oss": ("openai/gpt-oss-20b", "GptOssForCausalLM", "BF16", {
        "num_hidden_layers": 24, "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}),
    "DeepSeek": ("deepseek-ai/DeepSeek-V2-Lite-Chat", "DeepseekV2ForCausalLM", "BF16", {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "vocab_size": 102400,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}),
    "BERT": ("google-bert/bert-base-uncased", "BertForMaskedLM", "F32", {}),
    "ViT": ("google/vit-base-patch16-224", "ViTForImageClassification", "F32", {"num_labels": 1000}),
    "Whisper": ("openai/whisper-large-v3", "WhisperForConditionalGeneration", "F16", {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": 51866,
        "num_mel_bins": 128}),
}  # fmt: skip
OPTIONS = {
    "fp8, transformers": "--format e4m3fn",
    "fp8, vLLM": "--scheme FP8_DYNAMIC",
    "4 bits, vLLM": "--scheme W4A16",
    "4 bits, llama.cpp": "--scheme GGUF_Q4_0",
    "4 bits, mlx-lm": "--scheme MLX_INT4",
}
_OF_ENCODERS = {k.replace("vLLM", "compressed-tensors"): v for k, v in OPTIONS.items() if "mlx" not in k}


def tensors(family: str) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """The config of a published checkpoint, and the dtype and shape of each of its tensors."""
    _, name, dtype, settings = MODELS[family]
    model_class = getattr(transformers, name)
    plain = {k: v for k, v in settings.items() if k != "quantization_config"}
    with torch.device("meta"):
        model = model_class(model_class.config_class(**plain))
    config = {**model.config.to_dict(), **settings, "architectures": [name]}
    config["dtype"] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, x in model.state_dict().items():
        if key not in tied:
            found |= _stored(key, tuple(x.shape), dtype, is_mxfp4="quantization_config" in settings)
    return config, found


def _stored(name: str, shape: tuple[int, ...], dtype: str, *, is_mxfp4: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A weight as it is published: experts in blocks of MXFP4 (gpt-oss), or one by one."""
    if len(shape) != 3 or not name.endswith("_proj"):
        return {name: (dtype, shape)}
    count, rows, cols = shape
    if is_mxfp4:  # transposed in the model
        return {
            f"{name}_blocks": ("U8", (count, cols, rows // 32, 16)),
            f"{name}_scales": ("U8", (count, cols, rows // 32)),
        }
    prefix, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    one = (dtype, (rows // len(parts), cols))
    return {f"{prefix}.{i}.{part}.weight": one for i in range(count) for part in parts}


def write(folder: Path, family: str) -> int:
    """Write a checkpoint whose file has a header and no bytes on the disk; returns the bytes that it stands for."""
    config, found = tensors(family)
    demo_with_merges(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    header, end = {}, 0
    for name, (dtype, shape) in found.items():
        start, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = raw_safetensors(header)
    (folder / "model.safetensors").write_bytes(raw)
    os.truncate(folder / "model.safetensors", len(raw) + end)
    return end


def section(family: str, folder: Path) -> str:
    """What to type for a family, with bytes, and what is refused, by the message of the refusal."""
    name, before = MODELS[family][0], write(folder, family)
    lines, refused = [], []
    options_by_use = OPTIONS if "CausalLM" in MODELS[family][1] else _OF_ENCODERS
    for what, options in options_by_use.items():
        done = CliRunner().invoke(app, ["convert", str(folder), *options.split(), "--dry-run", "--json"])
        answer = json.loads(done.stdout)
        if done.exit_code:
            refused.append(f"- `{options}` is refused: {answer['error']['message'].replace(str(folder), name)}")
        else:
            command, after = f"lpconv convert {name} {options}", answer["bytes"]["written"]
            lines.append(f"{command:<78}  # {what}: {after / 1e9:.2f} GB")
    size = f"`{name}`: {before / 1e9:.2f} GB."
    return "\n".join([f"## {family}\n", size, "\n```", *lines, "```\n", *refused, *([""] if refused else [])])


def page() -> str:
    """The whole of docs/models.md; the text above the first family is that of the present page."""
    head = PAGE.read_text(encoding="utf-8").partition("## ")[0]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_defects, "from_scales", lambda *_, **__: Findings())  # would read gigabytes of zeros
        return head + "\n".join(section(family, Path(folder) / family) for family in MODELS).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
