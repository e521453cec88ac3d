"""The model card says what the output is, how to open it, what was measured and how to go back."""

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_examples import bert_result, llama_result

from lpconv.report.convert.card import model_card
from lpconv.results import ByteCounts, ConvertResult, LogitsCheck, SourceRecord, VerifyResult

GOLDEN = Path(__file__).parent / "golden"
RESULTS = {"unit-fp16": bert_result(), "collage-bf16": bert_result("bf16", "collage"), "llama-e4m3fn": llama_result()}


def front_matter(card: str) -> dict[str, Any]:
    facts: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return facts


@pytest.mark.parametrize("name", RESULTS)
def test_card_is_the_golden_text(name: str) -> None:
    """After a wanted change, run once with REWRITE_GOLDEN=1 and read the difference."""
    path = GOLDEN / f"card-{name}.md"
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(model_card(RESULTS[name]), encoding="utf-8")
    assert model_card(RESULTS[name]) == path.read_text(encoding="utf-8")


def test_front_matter_names_the_base_model() -> None:
    facts = front_matter(model_card(bert_result()))
    assert facts["library_name"] == "lpconv"
    assert facts["base_model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert {"lpconv", "unit-scaling", "fp16"} <= set(facts["tags"])


def test_front_matter_repeats_the_licence() -> None:
    facts = front_matter(model_card(bert_result(card={"license": "apache-2.0", "base_model": "a/b"})))
    assert facts["license"] == "apache-2.0"
    assert (facts["base_model"], facts["base_model_relation"]) == ("a/b", "quantized")


@pytest.mark.parametrize("resolved", ["/home/me/model", "models/mine"])
def test_a_local_directory_is_no_base_model(resolved: str) -> None:
    source = SourceRecord(name="mine", resolved=resolved)
    card = model_card(bert_result(source=source))
    assert "base_model" not in front_matter(card)
    assert resolved not in card, "the card is public, a path of this machine is not"


@pytest.mark.parametrize(
    ("architecture", "auto"),
    [("BertModel", "AutoModel"), ("BertForMaskedLM", "AutoModelForMaskedLM"), (None, "AutoModel"),
     ("GPT2LMHeadModel", "AutoModelForCausalLM"), ("LlamaForCausalLM", "AutoModelForCausalLM")],
)  # fmt: skip
def test_opening_uses_the_class_of_the_architecture(architecture: str | None, auto: str) -> None:
    assert f'model = {auto}.from_pretrained("PATH")' in model_card(bert_result(architecture=architecture))


@pytest.mark.parametrize("method", ["unit", "scalify"])
def test_codes_need_lpconv_and_say_so(method: str) -> None:
    card = model_card(bert_result(method=method))
    assert "import lpconv.hf" in card
    assert "trust_remote_code=True" in card
    assert "refuses these weights on purpose" in card


def test_collage_opens_anywhere_and_keeps_its_residual() -> None:
    card = model_card(bert_result("bf16", "collage"))
    assert "an ordinary bf16 checkpoint" in card
    assert "lpconv.load" in card
    assert "refuses" not in card


def exact_result() -> ConvertResult:
    tensors = tuple(replace(t, sqnr_db=math.inf, max_rel_error=0.0) for t in bert_result("fp32").tensors)
    v = VerifyResult(level="logits", passed=True, logits=LogitsCheck(bit_equal=True, max_abs_diff=0.0))
    return bert_result("fp32", tensors=tensors, verify=v)


def test_restoring_is_called_exact_only_where_it_was_measured_to_be() -> None:
    assert "converted ones exactly" in model_card(exact_result())
    assert "with the errors given above" in model_card(bert_result())
    unread = tuple(replace(t, sqnr_db=None) for t in bert_result().tensors)
    assert "not measured" in model_card(bert_result(tensors=unread))


def test_every_number_stands_in_the_record() -> None:
    card = model_card(bert_result())
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, flags=re.MULTILINE))
    assert rows["size before"] == "90.9 MB"
    assert rows["outputs max diff."] == "2.6e-04"
    assert rows["same first choice"] == "100.00 %"


def test_a_second_run_writes_the_same_card() -> None:
    again = replace(bert_result(), seconds=9.0, weights_seconds=8.0, peak_rss_bytes=1, output="elsewhere/else")
    assert model_card(again) == model_card(bert_result())


def test_a_hostile_name_stays_text() -> None:
    name = "`|<script>alert(1)</script>|[x](javascript:y)\n# head"
    bad = replace(bert_result().tensors[1], name=name, sqnr_db=1.0, reason="<b>|_x_")
    card = model_card(bert_result(tensors=(bad,), warnings=(name,), source=SourceRecord(name=name, resolved=name)))
    outside_code = re.sub(r"(`+).*?\1", "", card.replace("\\`", ""))
    assert "<script>" not in outside_code
    assert "<b>" not in outside_code
    assert "\n# head" not in card
    assert "](javascript" not in outside_code.replace("\\]", "")
    tables = [line for line in card.splitlines() if line.startswith("| ") and "script" in line]
    assert tables
    for line in tables:
        assert len(re.findall(r"(?<!\\)\|", line)) in (3, 7), "a bar in a name adds no cell"


def test_nothing_converted() -> None:
    card = model_card(bert_result(tensors=(), bytes=ByteCounts(read=0, written=0), command=None))
    assert "0 of 0 tensors" in card
    assert "Made by" not in card
