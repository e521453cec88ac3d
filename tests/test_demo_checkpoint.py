"""The demo checkpoint is what its metrics say: small, trained, and openable by plain transformers."""

import hashlib
import json
import math

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lpconv.data import demo_checkpoint, demo_text
from lpconv.errors import UsageError

METRICS = json.loads((demo_checkpoint() / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(demo_checkpoint()).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_checkpoint())


@torch.no_grad()
def slice_bits(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Bits per byte on the recorded slice of the held-out play, in windows as long as the model's positions."""
    text = demo_text("heldout").read_text(encoding="ascii")[: METRICS["heldout"]["slice"]["bytes"]]
    rows = tokenizer(text, return_tensors="pt").input_ids.view(-1, model.config.max_position_embeddings)
    return float(model(input_ids=rows, labels=rows).loss) / math.log(2)


def test_heldout_loss_is_what_the_metrics_say(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    # fp32 sums in another order move the fifth digit; a wrong weight moves the first.
    assert slice_bits(model, tokenizer) == pytest.approx(METRICS["heldout"]["slice"]["bits_per_byte"], abs=1e-3)


def test_file_holds_fp32_and_the_tied_head_once(model: LlamaForCausalLM) -> None:
    with safe_open(demo_checkpoint() / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  # not a mapping
    assert set(dtypes.values()) == {"F32"}
    assert "lm_head.weight" not in dtypes
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(("key", "split"), [("heldout", "heldout"), ("train_excerpt", "train")])
def test_shipped_text_is_the_text_that_was_measured(key: str, split: str) -> None:
    data = demo_text(split).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (METRICS[key]["bytes"], METRICS[key]["sha256"])


@pytest.mark.parametrize(
    "text", ["To-be, or not-to-be", "  2  blanks\n\n\ttab\r\n", "Zoë naïve Ā ſ 日本 🎭 \x00\x7f", ""]
)
def test_token_ids_are_the_bytes_and_come_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_unknown_split_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        demo_text("heldut")
    assert "`heldout`" in (caught.value.hint or "")
