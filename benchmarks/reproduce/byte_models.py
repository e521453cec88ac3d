"""Small byte-level language models, batches of the plays that ship with lpconv, and the loss on those held out."""

import statistics
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn

from lpconv.data import demo_text

MASK = 256  # the id after the bytes


def corpus(split: str) -> Tensor:
    """The bytes of the sample plays of a split."""
    return torch.frombuffer(bytearray(demo_text(split).read_bytes()), dtype=torch.uint8).long()


def build(kind: str, hidden: int, layers: int, length: int) -> nn.Module:
    """A Llama or a masked BERT, without dropout and with plain attention."""
    heads = max(1, hidden // 32)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": MASK + 1}
    if kind == "llama":
        config = transformers.LlamaConfig(
            intermediate_size=8 * hidden // 3 // 16 * 16, max_position_embeddings=length,
            attn_implementation="eager", **sizes,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        intermediate_size=4 * hidden, max_position_embeddings=length, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0, attn_implementation="eager", **sizes,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def windows(ids: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows of a text, [count, length]."""
    starts = torch.randint(0, len(ids) - length, (count,), generator=generator)
    return torch.stack([ids[s : s + length] for s in starts.tolist()])


def batch_of(kind: str, text: Tensor, count: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random windows; for BERT 15 % of the bytes are masked and predicted."""
    ids = windows(text, count, length, generator)
    if kind == "llama":
        return {"input_ids": ids, "labels": ids}
    masked = torch.rand(ids.shape, generator=generator) < 0.15
    return {"input_ids": ids.masked_fill(masked, MASK), "labels": ids.masked_fill(~masked, -100)}


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
    """Mean loss over batches, in nats per byte."""
    model.eval()
    losses = [model(**batch).loss.item() for batch in batches]
    model.train()
    return statistics.fmean(losses)
