"""Every task on a two-layer model built here, with a tokenizer of bytes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.models.tasks import find_task, main_input
from lpconv.models.tokenizer import answer_tokens, tokenize
from lpconv.progress import Silent
from lpconv.report.finetune import verdict
from lpconv.results import FinetuneResult
from lpconv.storage.checkpoint import Checkpoint
from lpconv.train.data import read_rows, with_template
from lpconv.train.examples import sequence_pairs
from lpconv.train.job import open_start, training_job
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune
from lpconv.train.trainer import DivergedError
from tests.helpers.checkpoints import write_checkpoint

SPECIAL = ["<pad>", "</s>", "<mask>", "<cls>"]
SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def write_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *letters])}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split("", "isolated")]
    )
    inner.post_processor = processors.TemplateProcessing("<cls> $A </s>", special_tokens=[("<cls>", 3), ("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", mask_token="<mask>", cls_token="<cls>"
    ).save_pretrained(folder)


def write_model(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    bert = transformers.BertConfig(**SMALL, max_position_embeddings=64)
    t5 = transformers.T5Config(
        vocab_size=260, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    made: dict[str, Any] = {
        "bert": lambda: transformers.BertModel(bert),
        "masked": lambda: transformers.BertForMaskedLM(bert),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=1)
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(t5),
    }
    made[kind]().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    table = [{"text": f"{'good' if i % 2 else 'bad'} thing {i}", "label": "yes" if i % 2 else "no"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def run(model: Path, recipe: str, output: Path, **more: Any) -> FinetuneResult:
    small: dict[str, Any] = {"steps": 3, "batch_size": 4, "seq_len": 24, "eval_batches": 2}
    return finetune(str(model), output, FinetuneOptions(arithmetic=arithmetic(recipe=recipe), **(small | more)))


def test_a_bare_encoder_learns_classes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "bert", "bert")
    asked: dict[str, Any] = {"steps": 60, "lr": 3e-3, "eval_every": 0, "twin": "none"}
    result = run(model, "unit-fp8", tmp_path / "run", data=str(rows(tmp_path)), **asked)
    assert result.task == "classification"
    accuracy = next(s for s in result.runs[0].evaluations if s.name == "eval_accuracy")
    assert accuracy.values[-1] == 1.0
    assert result.learned("run")
    assert {h.metric: (h.num_examples, h.num_available) for h in result.held_out}["eval_accuracy"] == (6, 6)
    assert any("seed" in w for w in result.warnings)
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert opened.config.id2label == {0: "no", 1: "yes"}


def test_batches_of_a_step_weigh_by_their_targets(tmp_path: Path) -> None:
    """As one batch of all their examples in plain torch."""
    model = transformers.T5ForConditionalGeneration.from_pretrained(write_model(tmp_path / "t5", "t5"), dropout_rate=0)
    model.save_pretrained(tmp_path / "t5")
    pairs = [{"text": f"say {i}", "label": "ab" * (i % 7 + 1)} for i in range(40)]
    how: dict[str, Any] = {"data": jsonl(tmp_path / "pairs.jsonl", pairs), "batch_size": 1, "grad_accum": 3, "lr": 1e-2,
                           "schedule": "constant", "warmup": 0.0, "clip": 0.0, "weight_decay": 0.1}  # fmt: skip
    losses = run(tmp_path / "t5", "fp32", tmp_path / "run", twin="none", **how).runs[0].losses.values
    job = training_job(Checkpoint.open(tmp_path / "t5"), asked(**how, steps=3, seq_len=24))
    stream, optimizer = job.stream(0, held_out=False), torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    for step in range(3):
        batch = job.collate([stream[3 * step + i] for i in range(3)])
        loss = torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten())
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_run_and_twin_drop_the_same_units(tmp_path: Path) -> None:
    """BERT has dropout: with other masks the losses of two precisions would differ by far more than rounding."""
    model = write_model(tmp_path / "bert", "bert")
    result = run(model, "unit-fp8", tmp_path / "run", data=str(rows(tmp_path)))
    run_, twin = result.runs
    assert run_.losses.values == pytest.approx(twin.losses.values, abs=0.02)
    # Three steps at the default rate teach nothing, and equal figures must not be read as "precision cost nothing".
    assert any(w.startswith("unit-fp8 ") for w in result.warnings)
    assert "gap" in verdict(result)
    assert any("seed" in w for w in result.warnings)  # the new head
    again = run(model, "unit-fp8", tmp_path / "run", data=str(rows(tmp_path)), resume=True)
    assert again.warnings == result.warnings


@pytest.mark.parametrize("recipe", ["amp-fp16", "scalify-fp8"])
def test_a_masked_model_trains_on_text(recipe: str, tmp_path: Path) -> None:
    result = run(write_model(tmp_path / "masked", "masked"), recipe, tmp_path / "run")
    assert result.task == "mlm"
    assert result.gaps[0].gap == pytest.approx(0, abs=0.05)


def test_a_published_gpt2_has_the_loss_of_the_training_and_its_own_config(tmp_path: Path) -> None:
    """transformers knows no type of loss for its class; its Trainer then divided losses by one target too many."""
    result = run(write_model(tmp_path / "gpt2", "gpt2"), "fp32", tmp_path / "run")
    assert [g.gap for g in result.gaps] == [0.0] * 3
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("gpt2", "run"))
    assert before["pad_token_id"] is after["pad_token_id"] is None


def test_held_out_losses_are_means_over_targets_like_their_baseline(tmp_path: Path) -> None:
    """Trainer weights the loss of a batch by its examples, whatever the lengths of their targets."""
    folder, data = write_model(tmp_path / "t5", "t5"), tmp_path / "pairs.jsonl"
    table = [{"text": f"say {i}", "label": "a" if i % 4 else "a long answer " * 2} for i in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in table))
    result = run(folder, "fp32", tmp_path / "run", data=str(data), twin="none", batch_size=1, eval_batches=6)
    batches = result.runs[0].held_out[-1]
    assert len(set(batches.sizes)) == 2
    exact = math.fsum(n * x for n, x in zip(batches.sizes, batches.losses, strict=True)) / sum(batches.sizes)
    ends = {s.name: s.values[-1] for s in result.runs[0].evaluations}
    assert ends == {
        name: pytest.approx(exact, rel=1e-6) for name in ("eval_loss", "eval_loss_fp32", "eval_loss_published")
    }
    (held_out,) = result.held_out
    assert held_out.after == pytest.approx(exact, rel=1e-6)
    assert held_out.num_examples == 6


def test_weights_in_memory_are_not_needed_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10**12]

    def fill_memory(*args: Any) -> Any:
        free[0] = 0
        return open_start(*args)

    monkeypatch.setattr("lpconv.train.one.open_start", fill_memory)
    monkeypatch.setattr("lpconv.train.memory.available_memory", lambda: free[0])
    assert run(write_model(tmp_path / "gpt2", "gpt2"), "fp32", tmp_path / "run", twin="none").runs


def test_targets_without_tokens_are_refused(tmp_path: Path) -> None:
    """A batch of them has no loss. Tokenizers that end targets with a token give even an empty text one."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"text": "say", "label": "" if i == 7 else "a"}) + "\n" for i in range(20)))
    tokenizer = Tokenizer(models.WordLevel({"say": 0, "a": 1}))
    read = read_rows(FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), data=str(data)))
    with pytest.raises(InputError, match=r"pairs\.jsonl"):
        sequence_pairs(read, transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer), seq_len=4, vocab_size=2)


@pytest.mark.parametrize("recipe", ["collage-bf16", "unit-fp8"])
def test_an_encoder_with_a_decoder_learns_targets(recipe: str, tmp_path: Path) -> None:
    result = run(write_model(tmp_path / "t5", "t5"), recipe, tmp_path / "run", data=str(rows(tmp_path)))
    assert result.task == "seq2seq"
    assert result.runs[0].losses.values == pytest.approx(result.runs[1].losses.values, abs=0.1)


def test_what_reads_no_text_is_refused_by_what_it_reads(tmp_path: Path) -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32}
    write_checkpoint(tmp_path / "vit", config=config)
    with pytest.raises(UnsupportedError, match="`ViTForImageClassification`"):
        run(tmp_path / "vit", "fp32", tmp_path / "run")
    assert main_input({"architectures": ["CLIPModel"]}) == "input_ids, pixel_values"
    own = {"architectures": ["MyLM"], "auto_map": {"AutoModel": "my.MyLM"}}
    with pytest.raises(UnsupportedError, match="`MyLM`"):
        find_task(own, "auto", has_labels=False)


def test_what_a_bare_encoder_is_for_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`Bert|config.json`"):
        run(write_model(tmp_path / "bert", "bert"), "fp32", tmp_path / "run")
    with pytest.raises(UsageError, match="64 positions"):
        run(tmp_path / "bert", "fp32", tmp_path / "run", task="mlm", seq_len=65)


class Messages(Silent):
    """Keeps what a command tells the user."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def jsonl(path: Path, table: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return str(path)


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_a_class_that_does_not_shift_labels_learns_the_next_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {f"{side}_{what}": n for side in ("encoder", "decoder")
                             for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))}  # fmt: skip
    config = transformers.BartConfig(vocab_size=260, d_model=32, max_position_embeddings=64, **sizes)
    model = saved(tmp_path / "bart", transformers.BartForCausalLM(config))
    data = tmp_path / "held.txt"
    data.write_text("to be or not to be, " * 60)
    asked: dict[str, Any] = {"lr": 1e-2, "steps": 10, "eval_data": str(data), "data": str(data), "eval_batches": 99}
    result = run(model, "fp32", tmp_path / "run", twin="none", **asked)
    assert sum("`BartForCausalLM`" in w for w in result.warnings) == 1
    ids = transformers.AutoTokenizer.from_pretrained(model)(data.read_text(), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids[: len(ids) // 24 * 24]).view(-1, 24)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    with torch.no_grad():
        logits = trained(input_ids=windows, use_cache=False).logits[:, :-1].double()
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    ends = {s.name: s.values[-1] for s in result.runs[0].evaluations}
    assert ends == {name: pytest.approx(float(exact), rel=1e-5) for name in ends}
    assert len(ends) == 3


SENTIMENT = {0: "pos", 1: "neg"}


@pytest.mark.parametrize("as_text", [True, False])
def test_a_trained_head_keeps_its_classes_and_their_names(as_text: bool, tmp_path: Path) -> None:
    """The accuracy before training is that of transformers with the head as it is."""
    torch.manual_seed(0)
    names = {"id2label": SENTIMENT, "label2id": {v: k for k, v in SENTIMENT.items()}}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **names)).eval()
    folder = saved(tmp_path / "bert", model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [f"thing {i}" for i in range(40)]
    with torch.no_grad():
        found = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]
    table = [{"text": text, "label": SENTIMENT[y] if as_text else y} for text, y in zip(texts, found, strict=True)]
    data = jsonl(tmp_path / "rows.jsonl", table)
    result = run(folder, "fp32", tmp_path / "run", data=data, eval_data=data, twin="none", eval_batches=99)
    accuracy = next(s for s in result.runs[0].evaluations if s.name == "eval_accuracy")
    assert accuracy.values[0] == 1.0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "run").id2label == SENTIMENT
    wrong = jsonl(tmp_path / "wrong.jsonl", [{"text": "x", "label": "good" if i % 2 else "pos"} for i in range(20)])
    with pytest.raises(InputError, match=r"`good`.* pos, neg"):
        run(folder, "fp32", tmp_path / "other", data=wrong)


@pytest.mark.parametrize("columns", [("input", "output"), ("text", "label")])
def test_texts_that_answer_texts_are_no_classes(columns: tuple[str, str], tmp_path: Path) -> None:
    model, seen = write_model(tmp_path / "gpt2", "gpt2"), Messages()
    data = jsonl(tmp_path / "pairs.jsonl", [{columns[0]: f"what is {i}?", columns[1]: f"it is {i}"} for i in range(60)])
    with pytest.raises(UsageError, match=f"`{columns[1]}`.*`GPT2LMHeadModel`") as caught:
        run(model, "fp32", tmp_path / "run", data=data)
    assert "--task clm" in (caught.value.hint or "")
    asked = FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), data=data, task="clm", steps=1, seq_len=24,
                            batch_size=2, twin="none")  # fmt: skip
    assert finetune(str(model), tmp_path / "clm", asked, progress=seen).task == "clm"
    (message,) = (m for m in seen.texts if "clm" in m)
    assert f"{columns[0]}, not {columns[1]}" in message


CHATS = {
    "messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}],
    "conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "me"}],
}
ROWS: dict[str, dict[str, Any]] = {c: {c: turns} for c, turns in CHATS.items()}
ROWS["completion"] = {"prompt": "who?", "completion": "me"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<cls>{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<cls>assistant {% endif %}"
)
ANSWER = "{{ m.content }}</s>"
MARKED = TEMPLATE.replace(
    ANSWER,
    "{% if m.role == 'assistant' %}{% generation %}"
    + ANSWER
    + "{% endgeneration %}{% else %}"
    + ANSWER
    + "{% endif %}",
)
FORGETFUL = TEMPLATE.replace("m.content", "(m.content if m.role == 'user' or loop.last else '-')")


@pytest.mark.parametrize(
    ("template", "answers"),
    [(TEMPLATE, ["me</s>you</s>"]), (MARKED, ["me</s>you</s>"]), (FORGETFUL, ["me</s>", "you</s>"])],
)
def test_answers_are_told_from_questions(template: str, answers: list[str], tmp_path: Path) -> None:
    """As the template marks them, or as they follow the prompt for them; not if it rewrites the questions."""
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    roles, texts = ["user", "assistant"] * 2, ["who?", "me", "whose?", "you"]
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    ids = [[i for i, x in zip(*found, strict=True) if x] for found in answer_tokens(tokenizer, turns, "chat")]
    assert ids == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers]
    tokenizer.chat_template = template.replace("{{ m.role }}", "{{ messages | length }}")
    if template != MARKED:
        with pytest.raises(InputError, match="begins"):
            answer_tokens(tokenizer, turns, "chat")


@pytest.mark.parametrize("first", [0, 1])
def test_answers_are_what_transformers_marks(first: int, tmp_path: Path) -> None:
    """Also if a conversation begins with one, and if a token joins the end of the prompt with the answer."""
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens([" you"])
    turns = [*CHATS["messages"], {"role": "user", "content": "whose?"}, {"role": "assistant", "content": "you"}][first:]
    tokenizer.chat_template = MARKED
    marked = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    tokenizer.chat_template = TEMPLATE
    ((ids, is_answer),) = answer_tokens(tokenizer, turns, "chat")
    assert ids == marked["input_ids"]
    assert is_answer == [x == 1 for x in marked["assistant_masks"]]


@pytest.mark.parametrize("missing", [None, []])
def test_a_first_conversation_that_is_missing_is_left_out(missing: Any, tmp_path: Path) -> None:
    """The training part is drawn, so its first row is found by text; texts of masked models are rendered as well."""
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = TEMPLATE
    table = [{"messages": [{**turn, "content": str(i)} for turn in CHATS["messages"]]} for i in range(30)]
    first = read_rows(asked(data=jsonl(tmp_path / "all.jsonl", table))).train[0]["messages"][0]["content"]
    table[int(first)] = {"messages": missing}
    found = with_template(read_rows(asked(data=jsonl(tmp_path / "some.jsonl", table))), tokenizer)
    assert found.is_chat
    wanted = [tokenizer.apply_chat_template(x, tokenize=False) if x else "" for x in found.train["messages"]]
    assert found.texts(found.train) == wanted
    assert wanted[0] == ""


@pytest.mark.parametrize("column", ROWS)
def test_conversations_are_rendered_by_the_chat_template(column: str, tmp_path: Path) -> None:
    """The loss is over the answers, which the template marks or begins as a prompt for them ends."""
    model = write_model(tmp_path / "gpt2", "gpt2")
    data = jsonl(tmp_path / "chat.jsonl", [ROWS[column]] * 30)
    with pytest.raises(InputError, match="template"):
        run(model, "fp32", tmp_path / "run", data=data)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    one = tokenizer.apply_chat_template(CHATS["messages"], tokenize=True, return_dict=False)
    job = training_job(Checkpoint.open(model), asked(data=data, seq_len=8))
    windows = np.concatenate([(one * 27)[: len(one) * 27 // 8 * 8]]).reshape(-1, 8)
    end = tokenizer("me</s>", add_special_tokens=False)["input_ids"]
    assert any(x["labels"][x["labels"] != -100].tolist() == end for x in job.examples.train)
    for x in job.examples.train:
        assert any((x["input_ids"] == w).all() for w in windows)
        assert {*x["labels"].tolist()} <= {-100, *end}
    assert run(model, "fp32", tmp_path / "chat", data=data, seq_len=8, twin="none").runs
    if column in CHATS:  # a text of other commands, too
        assert tokenize(Path(data), tokenizer, seq_len=8, vocab_size=260).windows[0, 1:-1].tolist() == one[:6]
    strange = jsonl(
        tmp_path / "strange.jsonl", [{"messages": [{"role": "alien", "content": "x"}, *CHATS["messages"]]}] * 30
    )
    with pytest.raises(InputError, match="alien"):
        run(model, "fp32", tmp_path / "run", data=strange)


def asked(**options: Any) -> FinetuneOptions:
    return FinetuneOptions(arithmetic=arithmetic(recipe="fp32"), **options)


@pytest.mark.parametrize("kind", ["t5", "mamba", "xlnet"])
def test_models_without_positions_have_no_longest_text(kind: str, tmp_path: Path) -> None:
    if kind == "t5":
        model, more = write_model(tmp_path / "t5", "t5"), {"data": str(rows(tmp_path))}
    else:
        made = {
            "mamba": lambda t: t.MambaForCausalLM(t.MambaConfig(**{**SMALL, "num_hidden_layers": 1}, state_size=4)),
            "xlnet": lambda t: t.XLNetLMHeadModel(t.XLNetConfig(vocab_size=260, d_model=32, n_layer=1, n_head=2)),
        }
        model, more = saved(tmp_path / kind, made[kind](transformers)), {}
    assert run(model, "fp32", tmp_path / "run", seq_len=256, batch_size=1, steps=1, twin="none", **more).runs


def test_a_classifier_without_a_padding_token_is_published_with_the_one_of_its_training(tmp_path: Path) -> None:
    model = write_model(tmp_path / "gpt2", "gpt2")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    run(model, "fp32", tmp_path / "run", data=str(rows(tmp_path)), twin="none")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    with torch.no_grad():
        both = opened(**tokenizer(["good thing", "bad"], padding=True, return_tensors="pt")).logits
        alone = opened(**tokenizer(["bad"], return_tensors="pt")).logits
    torch.testing.assert_close(both[1:], alone)


def test_a_multimodal_model_trains_as_a_classifier_of_texts(tmp_path: Path) -> None:
    """Its config has the padding id in the part for texts."""
    text = {**SMALL, "vocab_size": 270, "head_dim": 16, "num_key_value_heads": 1}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_index=265, boi_token_index=266, eoi_token_index=267,
    )  # fmt: skip
    model = saved(tmp_path / "gemma3", transformers.Gemma3ForConditionalGeneration(config))
    assert run(model, "fp32", tmp_path / "clm", twin="none", steps=1).task == "clm"
    result = run(model, "fp32", tmp_path / "run", twin="none", steps=1, data=str(rows(tmp_path)), task="classification")
    assert result.task == "classification"


def test_an_overflow_before_any_update_is_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    """As that of T5's `wo` in fp16; the recipe of the hint trains."""
    model = transformers.T5ForConditionalGeneration.from_pretrained(write_model(tmp_path / "t5", "t5"))
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[1].DenseReluDense.wo.weight.mul_(1e6)
    model.save_pretrained(tmp_path / "t5")
    more: dict[str, Any] = {"data": str(rows(tmp_path)), "twin": "none", "steps": 1}
    with pytest.raises(DivergedError) as caught:
        run(tmp_path / "t5", "amp-fp16", tmp_path / "run", **more)
    assert "--lr" not in (caught.value.hint or "")
    assert "amp-bf16" in (caught.value.hint or "")
    assert run(tmp_path / "t5", "amp-bf16", tmp_path / "other", **more).runs
