"""The demo checkpoint is what its metrics say: small, trained, and openable by plain transformers."""

import hashlib
import json
import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import lpconv
from lpconv.data import demo_checkpoint, demo_text
from lpconv.errors import UsageError

SCRIPT = Path(lpconv.__file__).parents[1] / "benchmarks" / "reproduce" / "train_demo.py"
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


@pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks/ is not part of the installed package")
def test_script_makes_a_checkpoint_of_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location("train_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    text = demo_text("train").read_text(encoding="ascii")[: 80 * script.BLOCK]
    (tmp_path / "short.txt").write_text(text, encoding="ascii")
    monkeypatch.setattr(script, "demo_text", lambda split: tmp_path / "short.txt")

    metrics = script.make(["short"], text, tmp_path / "made", script.Options(steps=3, batch_size=2))

    assert {p.name for p in (tmp_path / "made").iterdir()} == {p.name for p in demo_checkpoint().iterdir()}
    assert json.loads((tmp_path / "made" / "metrics.json").read_text(encoding="utf-8")) == metrics
    made, shipped = ((d / "tokenizer.json").read_bytes() for d in (tmp_path / "made", demo_checkpoint()))
    assert made == shipped
