"""Shapes of common models by name, for timing without their weights. Does not import torch or transformers.

The numbers are from the models' own config.json files; weights are random, which affects neither time nor size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A transformers config class, its model class, and the settings that differ from the config's defaults."""

    name: str
    config_class: str
    model_class: str
    settings: Mapping[str, object]

    def config(self) -> Any:
        import transformers

        return getattr(transformers, self.config_class)(**self.settings, architectures=[self.model_class])


def _preset(
    name: str, family: str, head: str, hidden: int, layers: int, heads: int, **settings: object
) -> ModelPreset:  # fmt: skip
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return ModelPreset(
        name=name, config_class=f"{family}Config", model_class=f"{family}{head}", settings={**sizes, **settings}
    )


def _encoder(name: str, family: str, hidden: int, layers: int, **settings: object) -> ModelPreset:
    return _preset(name, family, "ForMaskedLM", hidden, layers, hidden // 64, intermediate_size=4 * hidden, **settings)


def _gpt2(name: str, hidden: int, layers: int, heads: int) -> ModelPreset:
    settings = {"n_embd": hidden, "n_layer": layers, "n_head": heads}
    return ModelPreset(name=name, config_class="GPT2Config", model_class="GPT2LMHeadModel", settings=settings)


def _opt(name: str, hidden: int, layers: int, heads: int) -> ModelPreset:
    more = {"ffn_dim": 4 * hidden, "vocab_size": 50272, "word_embed_proj_dim": hidden}
    return _preset(name, "OPT", "ForCausalLM", hidden, layers, heads, **more)


def _pythia(name: str, hidden: int, layers: int, heads: int, vocab: int = 50304) -> ModelPreset:
    more = {"intermediate_size": 4 * hidden, "vocab_size": vocab}
    return _preset(name, "GPTNeoX", "ForCausalLM", hidden, layers, heads, **more)


def _llama(
    name: str, hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, *, tied: bool,
    family: str = "Llama", positions: int = 8192,
) -> ModelPreset:  # fmt: skip
    return _preset(
        name, family, "ForCausalLM", hidden, layers, heads, intermediate_size=inner, num_key_value_heads=kv,
        head_dim=hidden // heads, vocab_size=vocab, max_position_embeddings=positions, tie_word_embeddings=tied,
    )  # fmt: skip


_BERT = {"vocab_size": 30522}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
PRESETS: dict[str, ModelPreset] = {
    p.name: p
    for p in (
        _encoder("bert-base", "Bert", 768, 12, **_BERT),
        _encoder("bert-large", "Bert", 1024, 24, **_BERT),
        _encoder("roberta-base", "Roberta", 768, 12, **_ROBERTA),
        _encoder("roberta-large", "Roberta", 1024, 24, **_ROBERTA),
        _gpt2("gpt2", 768, 12, 12),
        _gpt2("gpt2-medium", 1024, 24, 16),
        _gpt2("gpt2-large", 1280, 36, 20),
        _gpt2("gpt2-xl", 1600, 48, 25),
        _opt("opt-125m", 768, 12, 12),
        _opt("opt-1.3b", 2048, 24, 32),
        _opt("opt-6.7b", 4096, 32, 32),
        _pythia("pythia-160m", 768, 12, 12),
        _pythia("pythia-410m", 1024, 24, 16),
        _pythia("pythia-1.4b", 2048, 24, 16),
        _pythia("pythia-6.9b", 4096, 32, 32, 50432),
        _llama("smollm2-135m", 576, 1536, 30, 9, 3, 49152, tied=True),
        _llama("llama-1b", 2048, 8192, 16, 32, 8, 128256, tied=True),
        _llama("llama-3b", 3072, 8192, 28, 24, 8, 128256, tied=True),
        _llama("llama-8b", 4096, 14336, 32, 32, 8, 128256, tied=False),
        _llama("llama-70b", 8192, 28672, 80, 64, 8, 128256, tied=False),
        _llama("mistral-7b", 4096, 14336, 32, 32, 8, 32000, tied=False, family="Mistral", positions=32768),
        _llama("qwen-0.5b", 896, 4864, 24, 14, 2, 151936, tied=True, family="Qwen2", positions=32768),
        _llama("qwen-1.5b", 1536, 8960, 28, 12, 2, 151936, tied=True, family="Qwen2", positions=32768),
        _llama("qwen-7b", 3584, 18944, 28, 28, 4, 152064, tied=False, family="Qwen2", positions=32768),
    )
}
