"""A conversion as a document: the answers that a reader looks for, and what is shown where."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lpconv.report.cards import model_card
from lpconv.report.convert import compare_conversions, convert_document, plan_document
from lpconv.report.document import Checks, Code, Document, Section, Table, texts_of
from lpconv.report.html import html
from lpconv.report.markdown import markdown
from lpconv.report.tensor_charts import feedback_chart, rms_chart
from lpconv.report.terminal import terminal
from lpconv.results import (
    ByteCounts,
    ConvertResult,
    GateRecord,
    LogitsCheck,
    RoundingRecord,
    SourceRecord,
    TensorRecord,
    VerifyResult,
)
from tests.helpers.report_examples import (
    bert_result,
    blocks_of,
    calibrated_result,
    charts_of,
    llama_result,
    plan_of,
    section_of,
    verdict_of,
)


def described(**changes: Any) -> Document:
    return convert_document(bert_result(**changes))


def table_of(section: Section) -> Table:
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return table


def coded(count: int = 40) -> tuple[TensorRecord, ...]:
    return tuple(t for t in bert_result().tensors if t.action == "convert")[:count]


def test_the_first_questions_are_answered() -> None:
    document = described()
    assert verdict_of(document).outcome == "passed"
    assert re.search(r"^Verified: KL 3\.1e-08 ", verdict_of(document).text)
    assert re.search(r"40 of 104 tensors .* fp16, 64 ", document.summary)
    tiles = {tile.label: (tile.figure, tile.detail) for tile in document.tiles}
    assert tiles["Weights"][0] == "45.5 MB"
    assert re.search(r"90\.9 MB: 2\.00x .* 50\.1 %", tiles["Weights"][1])
    figure, detail = tiles["Lowest SQNR of a tensor"]
    assert (figure, detail.split()[0]) == ("72.2 dB", "encoder.layer.0.attention.self.key.weight")
    assert re.search(r"fp16 .* 73 \w+ 75", detail)
    assert tiles["Time"][0] == "420 ms"
    assert "325 MB/s" in tiles["Time"][1]
    assert [c.outcome for checks in blocks_of(document, Checks) for c in checks.checks] == ["passed"] * 4
    (provenance,) = blocks_of(document, dict)
    assert provenance["Revision"] == "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
    assert provenance["Option scale"] == "pow2"
    assert document.versions["torch"] == "2.13.0"
    assert document.command is not None


def test_entropy_coded_integers_are_not_called_integers_of_16_bits() -> None:
    options = bert_result().options | {"budget_bits": 3.7}
    document = described(format="int16", options=options, tensors=tuple(replace(t, format="int16") for t in coded(3)))
    tables = [table_of(section_of(document, name)) for name in ("Tensors", "Every tensor")]
    assert " coded " in document.summary
    assert "int16" not in document.summary + str([table.rows for table in tables])
    tensors = tuple(replace(t, format="int16", scale=0.5) for t in coded(3))
    result = replace(bert_result(), format="int16", options=options, tensors=tensors)
    assert "int16" not in html(convert_document(result)) + markdown(model_card(result))
    assert "entropy-coded" in str(model_card(result).front_matter["tags"])


def test_a_page_lists_every_tensor_and_a_terminal_the_worst() -> None:
    document, result = described(), bert_result()
    every = table_of(section_of(document, "Every tensor"))
    assert {row[0] for row in every.rows} == {t.name for t in result.tensors}
    assert (section_of(document, "Every tensor").only, every.sortable) == ("page", True)
    worst = section_of(document, "Lowest signal-to-noise")
    assert worst.only == "terminal"
    assert len(table_of(worst).rows) == 10
    assert {row[-1] for row in table_of(worst).rows} == {"nothing"}
    flushed = table_of(section_of(convert_document(llama_result()), "Lowest signal-to-noise"))
    assert any(str(row[-1]).endswith("zero") for row in flushed.rows)
    layers = {row[0]: row[1:3] for row in texts_of(table_of(section_of(document, "By layer")))}
    assert layers["encoder.layer.5"] == ["16", "6"]


@pytest.mark.parametrize(
    ("layout", "opens"),
    [
        ("lpconv", "lpconv.load("),
        ("transformers", "AutoModel.from_pretrained("),
        ("other", "AutoModel.from_pretrained("),
    ],
)
def test_it_says_how_to_open_the_output(layout: str, opens: str) -> None:
    (code,) = blocks_of(described(options={"layout": layout}), Code)
    assert opens in code.lines[-1]
    assert "out/minilm-unit-fp16" in code.lines[-1]


@pytest.mark.parametrize("passed", [True, False])
def test_a_failure_is_the_verdict_with_its_reasons(passed: bool) -> None:
    verify = replace(bert_result().verify, passed=passed, problems=() if passed else ("a.weight: 3 dB",))
    document = described(verify=verify)
    assert verdict_of(document).outcome == ("passed" if passed else "failed")
    assert ("a.weight: 3 dB" in verdict_of(document).text) == (not passed)


def test_before_and_after_are_drawn_over_the_range_of_the_format() -> None:
    chart = rms_chart(bert_result())
    assert chart is not None
    kinds = [mark.kind for mark in chart.marks]
    assert kinds.count("before") == kinds.count("after") == 40
    assert [(box.kind, box.y) for box in chart.boxes] == [
        ("normal", (-14.0, pytest.approx(16, abs=1e-3))), ("subnormal", (-24.0, -14.0)),
    ]  # fmt: skip
    after = next(m for m in chart.marks if m.title.startswith("pooler.dense.weight: ") and m.title.endswith(", fp16"))
    assert 0 <= after.points[0][1] < 1, "the RMS of the codes is in [1, 2)"
    assert "fp16 from 2^-14 to 65504" in chart.description


def test_odd_figures_do_not_break_the_document() -> None:
    first, *rest = coded()
    odd = [
        replace(first, name="zeros", rms=0.0, absmax=0.0, scale=0.0, sqnr_db=math.inf),
        replace(first, name="empty", shape=(0, 4), rms=None, absmax=None, sqnr_db=None),
        replace(first, name="undefined", rms=math.nan, absmax=math.inf, scale=math.inf, sqnr_db=math.nan, num_nan=3),
        replace(first, name="noise", sqnr_db=-math.inf),
        replace(first, name="negative", scale=-0.5),
        replace(first, name="scalar", shape=()),
    ]
    document = described(tensors=(*odd, *rest))
    assert {t.name for t in odd} <= {row[0] for row in table_of(section_of(document, "Every tensor")).rows}
    assert "NaN, Inf" in table_of(section_of(document, "Every tensor")).columns
    assert html(document)


@pytest.mark.parametrize(
    "verify",
    [
        VerifyResult(level="none", passed=True),
        VerifyResult(level="logits", passed=True, logits=LogitsCheck(skipped="no config.json")),
        VerifyResult(
            level="weights", passed=False, gates=(GateRecord(expression="top1>=1", value=None, passed=False),)
        ),
    ],
)
def test_missing_fields_and_no_tensors(verify: VerifyResult) -> None:
    result = bert_result(
        tensors=(), files=(), side_files=(), bytes=ByteCounts(read=0, written=0), seconds=0.0, verify=verify,
        source=SourceRecord(name="x", resolved="x"), architecture=None, command=None, options={}, versions={},
    )  # fmt: skip
    document = convert_document(result)
    assert "0 of 0 tensors" in document.summary
    assert all(isinstance(block, str) for block in section_of(document, "Tensors").blocks)
    for shown in (document, compare_conversions([result, result], ["a", "b"]), plan_document(plan_of(result))):
        assert "None" not in html(shown)
        assert terminal(shown)


def test_a_plan_says_that_nothing_happened_and_what_it_needs() -> None:
    document = plan_document(plan_of(bert_result("e4m3fn")))
    assert document.summary.endswith("written.")
    assert document.facts["Disk"] == "34.7 MB needed, 512 GB free"
    assert document.facts["Memory"] == "260 MB with 2 workers"
    assert document.facts["Copied as is"] == "3 files: config.json, tokenizer.json, vocab.txt"
    assert "38.2" in verdict_of(document).text


def figures_of(results: Sequence[ConvertResult]) -> dict[str, list[str]]:
    document = compare_conversions(results, [f"run {i}" for i in range(len(results))])
    return {first: rest for first, *rest in texts_of(table_of(section_of(document, "Figures")))}


def test_conversions_are_compared_figure_by_figure_and_tensor_by_tensor() -> None:
    results = [bert_result(), bert_result("e4m3fn"), llama_result()]
    assert figures_of(results)["smallest SQNR, dB"] == ["72.2", "30.1", "30.0"]
    finer = [bert_result(options={"granularity": g, "layout": "lpconv"}) for g in ("tensor", "row")]
    *known, points = figures_of([*finer, replace(finer[0], method="multipoint")])["granularity"]
    assert known == ["tensor", "row"]
    assert "point" in points
    assert "residual" not in figures_of(finer), "what no run has"
    failed = replace(results[2], verify=replace(results[2].verify, passed=False))
    document = compare_conversions([*results[:2], failed], ["a", "b", "c"])
    assert verdict_of(document).outcome == "failed"
    assert re.search(r"^\w+ b\b.* c$", verdict_of(document).text)  # the smaller of two that are good enough
    unknown = compare_conversions(
        [replace(r, verify=VerifyResult(level="hash", passed=True)) for r in results[:2]], "ab"
    )
    assert re.search(r"^b .*--data", verdict_of(unknown).text)
    assert [title.partition(": ")[0] for title in charts_of(document)][1] == "a"
    rows = {first: rest for first, *rest in texts_of(table_of(section_of(document, "SQNR of every tensor, dB")))}
    assert rows["model.layers.0.self_attn.q_proj.weight"][:2] == ["–", "–"]
    assert rows["pooler.dense.weight"][0].startswith("fp16, 7")


def test_error_feedback_shows_the_error_of_each_layer_before_and_after() -> None:
    record = RoundingRecord(output_error=0.001, nearest_error=0.004, num_inputs=8192, max_steps=3.0, sha256="0" * 64)
    tensors = tuple(replace(t, rounding=record) if ".layer." in t.name else t for t in coded())
    result = replace(calibrated_result(), tensors=tensors)
    chart = feedback_chart(tensors)
    assert chart is not None
    assert [tick.label for tick in chart.x.ticks] == list("012345")
    assert {m.points[0][1] for m in chart.marks if m.shape == "square"} == {0.001}
    document = convert_document(result)
    tile = next(t for t in document.tiles if t.label == "Output error removed")
    assert tile.figure == "75 %"
    assert re.match(r"0\.1 % .* 0\.4 %", tile.detail)
    assert " 75 % " in document.summary
    assert html(document).count(">Output error, %<") == 2, "of each layer, and of each tensor"
