"""Classes of transformers and the loss that they compute from labels, next to torch's cross entropy of their logits."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.models.objective import find_objective, next_tokens
from lpconv.models.tasks import CLASSIFICATION, CLM, MLM, SEQ2SEQ, Task

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
DECODER = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_attention_heads": 2,
    "encoder_attention_heads": 2, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0}
FSMT = {k: v for k, v in DECODER.items() if k != "vocab_size"} | {"src_vocab_size": 99, "tgt_vocab_size": 99}
MOE = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
PROPHET = {"vocab_size": 99, "hidden_size": 32, "num_decoder_layers": 1, "num_encoder_layers": 1, "ngram": 2}
PROPHET |= {"num_decoder_attention_heads": 2, "decoder_ffn_dim": 64}
MODELS: dict[str, Any] = {
    "LlamaForCausalLM": lambda t: t.LlamaConfig(**SIZES),
    "GPT2LMHeadModel": lambda t: t.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2),
    "MambaForCausalLM": lambda t: t.MambaConfig(**SIZES, state_size=4),
    "BertLMHeadModel": lambda t: t.BertConfig(**SIZES),
    "BartForCausalLM": lambda t: t.BartConfig(**DECODER),
    "MarianForCausalLM": lambda t: t.MarianConfig(**DECODER, pad_token_id=0),
    "PegasusForCausalLM": lambda t: t.PegasusConfig(**DECODER),
    "BlenderbotForCausalLM": lambda t: t.BlenderbotConfig(**DECODER),
    "XLMWithLMHeadModel": lambda t: t.XLMConfig(vocab_size=99, emb_dim=32, n_layers=1, n_heads=2),
    "XLNetLMHeadModel": lambda t: t.XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=2, d_inner=64),
}
IDS = torch.randint(5, 97, (2, 16), generator=torch.Generator().manual_seed(0))


def build(name: str, config: Any) -> Any:
    config.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


def exact(logits: Tensor, targets: Tensor) -> float:
    """Mean cross entropy in float64, summed target by target."""
    picked = logits.double().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return float(-picked[targets >= 0].mean())


@pytest.mark.parametrize("name", MODELS)
def test_every_causal_class_is_given_labels_of_the_next_token(name: str) -> None:
    model = build(name, MODELS[name](transformers))
    found = find_objective(model, CLM, {"input_ids": IDS, "labels": IDS})
    with torch.no_grad():
        output = model(input_ids=IDS, labels=next_tokens(IDS) if found.shifted else IDS)
    assert float(output.loss) == pytest.approx(exact(output.logits[:, :-1], IDS[:, 1:]), rel=1e-5)
    keeps_labels = name not in ("LlamaForCausalLM", "GPT2LMHeadModel", "MambaForCausalLM", "BertLMHeadModel")
    sees_ahead = name in ("BertLMHeadModel", "XLMWithLMHeadModel", "XLNetLMHeadModel")
    assert (found.shifted, len(found.notes)) == (keeps_labels, keeps_labels + sees_ahead)


@pytest.mark.parametrize(
    ("name", "make", "task"),
    [
        ("BertForMaskedLM", lambda t: t.BertConfig(**SIZES), MLM),
        ("T5ForConditionalGeneration", lambda t: t.T5Config(**T5), SEQ2SEQ),
        ("BartForConditionalGeneration", lambda t: t.BartConfig(**DECODER), SEQ2SEQ),
        ("BertForSequenceClassification", lambda t: t.BertConfig(**SIZES), CLASSIFICATION),
    ],
)
def test_labels_of_other_tasks_stay_as_they_are(name: str, make: Any, task: Task) -> None:
    labels = torch.tensor([0, 1]) if task is CLASSIFICATION else torch.where(IDS % 3 == 0, -100, IDS)
    labels = labels[:, :9].contiguous() if task is SEQ2SEQ else labels
    found = find_objective(build(name, make(transformers)), task, {"input_ids": IDS, "labels": labels})
    assert (found.shifted, found.notes) == (False, ())


@pytest.mark.parametrize(
    ("name", "make", "task", "length", "message"),
    [
        # Its decoder reads the source, as long as the targets or not.
        ("FSMTForConditionalGeneration", lambda t: t.FSMTConfig(**FSMT, langs=["a", "b"]), SEQ2SEQ, 16, "decoder"),
        ("FSMTForConditionalGeneration", lambda t: t.FSMTConfig(**FSMT, langs=["a", "b"]), SEQ2SEQ, 9, "decoder"),
        ("ProphetNetForCausalLM", lambda t: t.ProphetNetConfig(**PROPHET), CLM, 16, "loss"),
        ("MixtralForCausalLM", lambda t: t.MixtralConfig(**MOE), CLM, 16, "loss"),
    ],
)
def test_another_objective_is_refused_by_name(name: str, make: Any, task: Task, length: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"`{name}`") as caught:
        find_objective(
            build(name, make(transformers)), task, {"input_ids": IDS, "labels": IDS[:, :length].contiguous()}
        )
    assert message in str(caught.value)
    assert caught.value.exit_code == 4
