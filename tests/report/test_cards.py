"""The model card says what the output is, how to open it, what was measured and how to go back."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import transformers

from lpconv import layouts
from lpconv.plan.options import LAYOUTS
from lpconv.report.cards import model_card
from lpconv.report.document import Code, Document, Prose, Table, texts_of
from lpconv.report.markdown import markdown
from lpconv.results import SourceRecord
from tests.helpers.report_examples import bert_result, blocks_of, section_of


def card(**changes: Any) -> Document:
    return model_card(bert_result(**changes))


def programs(document: Document) -> str:
    return "\n".join(line for code in blocks_of(document, Code) for line in code.lines)


def prose(document: Document) -> str:
    return " ".join(block.text for block in blocks_of(document, Prose))


def test_front_matter_names_the_base_model_and_repeats_the_licence() -> None:
    assert card().front_matter == {
        "library_name": "lpconv", "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "base_model_relation": "quantized", "tags": ["lpconv", "unit-scaling", "fp16", "low-precision"],
    }  # fmt: skip
    inherited = card(card={"license": "apache-2.0", "base_model": "a/b"}).front_matter
    assert (inherited["license"], inherited["base_model"]) == ("apache-2.0", "a/b")


@pytest.mark.parametrize("resolved", ["/home/me/model", "models/mine"])
def test_a_local_directory_is_no_base_model(resolved: str) -> None:
    document = card(source=SourceRecord(name="mine", resolved=resolved))
    assert "base_model" not in document.front_matter
    assert resolved not in markdown(document), "the card is public, a path of this machine is not"


@pytest.mark.parametrize(
    ("architecture", "auto"),
    [("BertModel", "AutoModel"), ("BertForMaskedLM", "AutoModelForMaskedLM"), (None, "AutoModel"),
     ("GPT2LMHeadModel", "AutoModelForCausalLM"), ("LlamaForCausalLM", "AutoModelForCausalLM")],
)  # fmt: skip
def test_opening_uses_the_class_of_the_architecture(architecture: str | None, auto: str) -> None:
    assert f'model = {auto}.from_pretrained("PATH")' in programs(card(architecture=architecture))


def test_collage_opens_anywhere_and_keeps_its_residual() -> None:
    document = model_card(bert_result("bf16", "collage"))
    assert "ordinary bf16" in prose(document)
    assert "lpconv.load" in programs(document)
    assert "import lpconv.hf" not in programs(document)


def test_every_layout_says_how_to_open_it() -> None:
    assert all(layouts.LAYOUTS[name].opening and layouts.LAYOUTS[name].tag for name in LAYOUTS if name != "lpconv")


@pytest.mark.parametrize(
    ("method", "options", "library", "tags"),
    [
        ("unit", {"layout": "lpconv"}, "lpconv", ["lpconv", "unit-scaling", "fp16", "low-precision"]),
        ("collage", {}, "transformers", ["lpconv", "collage", "bf16", "low-precision"]),
        ("unit", {"layout": "compressed-tensors"}, "transformers", ["compressed-tensors", "fp16", "low-precision"]),
    ],
)
def test_the_library_is_the_one_that_opens_the_files(
    method: str, options: dict[str, Any], library: str, tags: list[str]
) -> None:
    header = model_card(
        replace(bert_result("bf16" if method == "collage" else "fp16", method), options=options)
    ).front_matter
    assert (header["library_name"], header["tags"]) == (library, tags)


@pytest.mark.parametrize(
    ("architecture", "fmt", "granularity", "is_served"),
    [
        ("LlamaForCausalLM", "e4m3fn", "row", True),
        ("LlamaForCausalLM", "int4", "group:128", True),
        ("LlamaForCausalLM", "e4m3fn", "tensor", False),
        ("LlamaForCausalLM", "int8", "group:128", False),
        ("ViTForImageClassification", "e4m3fn", "row", False),
        ("WhisperForConditionalGeneration", "e4m3fn", "row", False),
        ("MT5ForConditionalGeneration", "e4m3fn", "row", False),
        ("Gemma3ForConditionalGeneration", "e4m3fn", "row", False),
    ],
)
def test_a_card_shows_vllm_and_the_class_that_opens_the_model(
    architecture: str, fmt: str, granularity: str, is_served: bool
) -> None:
    options = {"layout": "compressed-tensors", "granularity": granularity}
    document = card(architecture=architecture, format=fmt, options=options)
    assert ("vllm serve PATH" in programs(document)) == is_served
    auto = getattr(transformers, re.search(r"AutoModel\w*", programs(document))[0])  # type: ignore[index]  # always shown
    assert architecture in auto._model_mapping._model_mapping.values()


@pytest.mark.parametrize("layout", ["compressed-tensors", "transformers", "mlx", "gguf"])
def test_other_layouts_need_no_lpconv(layout: str) -> None:
    document = card(options={"layout": layout})
    assert "needed" in prose(document)
    assert not re.search(r"import\s+lpconv", programs(document))


@pytest.mark.parametrize(("sqnr_db", "words"), [(math.inf, "exactly"), (30.0, "errors"), (None, "measured")])
def test_restoring_is_called_exact_only_where_it_was_measured_to_be(sqnr_db: float | None, words: str) -> None:
    tensors = tuple(replace(t, sqnr_db=sqnr_db) for t in bert_result().tensors)
    assert words in str(section_of(card(tensors=tensors), "How to get the original back"))


def test_figures_and_worst_tensors_are_those_of_the_record() -> None:
    document = card()
    figures, done, worst = blocks_of(document, Table)
    rows = dict(texts_of(figures))  # type: ignore[arg-type]  # rows of two
    assert (rows["size before"], rows["outputs rel. error"], rows["same top prediction"]) == (
        "90.9 MB",
        "1.9e-04",
        "100 %",
    )
    assert done.rows[0][:3] == ("convert", "40", "F32 → fp16")
    assert worst.rows[0][0] == "encoder.layer.0.attention.self.key.weight"
    assert len(worst.rows) == 5
