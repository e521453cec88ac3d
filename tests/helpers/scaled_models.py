"""Small models of many architectures, built from their configs, each with a batch that has padding and labels."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

Batch = dict[str, Tensor]

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA = {**TINY, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**TINY, **NO_DROPOUT, "vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 0}


def text_batch(labels: str = "tokens") -> Batch:
    """Three rows of 12 tokens, the second padded after 7."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 64, (3, 12), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 7:], mask[1, 7:] = 0, 0
    if labels == "class":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1])}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def seq2seq_batch() -> Batch:
    batch = text_batch()
    return {**batch, "labels": batch["labels"][:, :6].contiguous()}


def image_batch() -> Batch:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def audio_batch() -> Batch:
    features = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(7))
    return {
        "input_features": features,
        "labels": torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(8)),
    }


def gpt2(**kw: Any) -> Any:
    return hf.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **kw
    )


def bart(cls: Any, **kw: Any) -> Any:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    return cls(vocab_size=64, d_model=32, dropout=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
               decoder_start_token_id=2, **sizes, **kw)  # fmt: skip


ARCHITECTURES: dict[str, tuple[Any, Callable[..., Any], Callable[[], Batch]]] = {
    "bert-mlm": (hf.BertForMaskedLM, lambda **k: hf.BertConfig(**BERT, **k), text_batch),
    "bert-cls": (hf.BertForSequenceClassification, lambda **k: hf.BertConfig(**BERT, **k), lambda: text_batch("class")),
    "roberta": (hf.RobertaForMaskedLM, lambda **k: hf.RobertaConfig(**BERT, **k), text_batch),
    "albert": (hf.AlbertForMaskedLM, lambda **k: hf.AlbertConfig(**BERT, embedding_size=16, **k), text_batch),
    "distilbert": (
        hf.DistilBertForMaskedLM,
        lambda **k: hf.DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=64, dropout=0,
                                        attention_dropout=0, max_position_embeddings=32, **k),
        text_batch,
    ),
    "electra": (hf.ElectraForMaskedLM, lambda **k: hf.ElectraConfig(**BERT, embedding_size=16, **k), text_batch),
    "gpt2": (hf.GPT2LMHeadModel, gpt2, text_batch),
    "gpt-neox": (
        hf.GPTNeoXForCausalLM,
        lambda **k: hf.GPTNeoXConfig(**TINY, vocab_size=64, max_position_embeddings=32, **k),
        text_batch,
    ),
    "opt": (
        hf.OPTForCausalLM,
        lambda **k: hf.OPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
                                 max_position_embeddings=32, word_embed_proj_dim=32, dropout=0, pad_token_id=0, **k),
        text_batch,
    ),
    "llama": (hf.LlamaForCausalLM, lambda **k: hf.LlamaConfig(**LLAMA, **k), text_batch),
    "mistral": (hf.MistralForCausalLM, lambda **k: hf.MistralConfig(**LLAMA, sliding_window=8, **k), text_batch),
    "qwen3": (hf.Qwen3ForCausalLM, lambda **k: hf.Qwen3Config(**LLAMA, head_dim=8, **k), text_batch),
    "gemma": (hf.GemmaForCausalLM, lambda **k: hf.GemmaConfig(**LLAMA, head_dim=8, **k), text_batch),
    "phi": (hf.PhiForCausalLM, lambda **k: hf.PhiConfig(**LLAMA, resid_pdrop=0, **k), text_batch),
    "t5": (
        hf.T5ForConditionalGeneration,
        lambda **k: hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0,
                                decoder_start_token_id=0, pad_token_id=0, **k),
        seq2seq_batch,
    ),
    "bart": (
        hf.BartForConditionalGeneration,
        lambda **k: bart(hf.BartConfig, max_position_embeddings=32, **k),
        seq2seq_batch,
    ),
    "vit": (
        hf.ViTForImageClassification,
        lambda **k: hf.ViTConfig(**TINY, **NO_DROPOUT, image_size=16, patch_size=4, **k),
        image_batch,
    ),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        lambda **k: bart(hf.WhisperConfig, num_mel_bins=8, max_source_positions=12, max_target_positions=16, **k),
        audio_batch,
    ),
}  # fmt: skip


def build(name: str, attention: str = "eager", *, num_layers: int | None = None) -> tuple[nn.Module, Batch]:
    """A model of the architecture in training mode, without dropout, and a batch for it; the same for every call."""
    model_class, config, batch = ARCHITECTURES[name]
    torch.manual_seed(0)
    settings = config(attn_implementation=attention)
    if num_layers is not None:
        settings.num_hidden_layers = num_layers
    model = model_class(settings)
    spread(model)
    return model.train(), batch()


def spread(model: nn.Module) -> None:
    """Give constant parameters (biases 0, norms 1) values, so that a rule that mishandles one is seen."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def loss_and_grads(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients, after one backward pass."""
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
