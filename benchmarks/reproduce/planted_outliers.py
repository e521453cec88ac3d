"""A Qwen3-shaped model, trained from scratch on plays, with outliers like those of large models planted afterwards.

The architecture is transformers' Qwen3: norms of queries and keys, grouped queries, a gated MLP, untied embeddings. A
few channels of every MLP and of every normed input are multiplied by a power of two and the columns that read them are
divided by it. The function stays the same bit for bit, while single activations are some hundred times larger than the
rest, which makes fp8 operands clip (SmolLM2's `down_proj` has such outliers by itself).
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.reproduce.train_demo import BLOCK, END_ID, VOCAB_SIZE, Options, byte_tokenizer, train
from lpconv.data import demo_text

GATED = 2.0**9  # factor of a channel of the gated product
NORMED = 2.0**5  # factor of a channel of a normed input
_CHANNELS = 2  # per tensor


def new_model() -> Qwen3ForCausalLM:
    """The untrained model: 2.6 M parameters in six layers."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=BLOCK, tie_word_embeddings=False,
        bos_token_id=END_ID, eos_token_id=END_ID, pad_token_id=END_ID,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def plant(model: nn.Module) -> None:
    """Plant outliers in the inputs of every block's linear layers, in place; exact, since factors are powers of two."""
    for layer in model.get_submodule("model.layers").children():
        mlp, attention = layer.get_submodule("mlp"), layer.get_submodule("self_attn")
        _move(layer, "mlp.up_proj.weight", [mlp.get_parameter("down_proj.weight")], GATED)
        readers: list[Tensor] = [attention.get_parameter(f"{name}_proj.weight") for name in "qkv"]
        _move(layer, "input_layernorm.weight", readers, NORMED)
        readers = [mlp.get_parameter(f"{name}_proj.weight") for name in ("gate", "up")]
        _move(layer, "post_attention_layernorm.weight", readers, NORMED)


def _move(layer: nn.Module, writer: str, readers: list[Tensor], factor: float) -> None:
    weight = layer.get_parameter(writer)
    channels = torch.randperm(len(weight))[:_CHANNELS]
    weight[channels] *= factor
    for reader in readers:
        reader[:, channels] /= factor


def make(folder: Path, steps: int) -> None:
    """Train, plant outliers, check that the function is unchanged bit for bit, and save model and tokenizer."""
    torch.manual_seed(0)
    tokenizer, model = byte_tokenizer(), new_model()
    ids = torch.tensor(tokenizer(demo_text("train").read_text(encoding="ascii"))["input_ids"])
    train(model, ids, Options(steps=steps, batch_size=8, learning_rate=2e-3))
    model.eval()
    shown = ids[:BLOCK][None]
    before = model(shown).logits
    plant(model)
    if not torch.equal(model(shown).logits, before):
        raise SystemExit("planting changed the function")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
