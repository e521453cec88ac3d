"""An advice on the terminal and as a page."""

import math
import re
from dataclasses import replace

import pytest

from lpconv.report.advise import advice_document, front_chart, recommendation, unknowns
from lpconv.report.document import Code, Folded, Table
from lpconv.results import AdviceResult, Recommendation, from_json, to_json
from tests.helpers.advice_examples import a_row, an_advice, gap
from tests.helpers.report_examples import blocks_of


def test_the_record_survives_json() -> None:
    result = an_advice(a_row(), a_row("odd", gap=gap(math.inf, math.inf)))
    assert str(from_json(AdviceResult, to_json(result))) == str(result)


def test_the_recommendation_names_size_gap_and_budget() -> None:
    result = an_advice()
    words = recommendation(result, result.rows[0], "infer")
    figures = ("unit e4m3fn, rows: 1.00 MB", "4.00 MB", "4.00x", " 8 ", "+0.0040", "+0.0020", "+0.0060", "0.01 nats")
    assert re.search(".*".join(map(re.escape, figures)), words)


def test_without_a_candidate_the_nearest_is_named() -> None:
    result = an_advice(a_row("a", gap=gap(0.02, 0.001), meets=False))
    assert " a: +0.0200" in recommendation(result, None, "infer")
    assert "measured" in recommendation(result, None, "train")


def test_what_is_not_known_is_said() -> None:
    result = an_advice(a_row(), a_row("later", status="unmeasured", gap=None), interrupted=True)
    said = " ".join(unknowns(result))
    for words in ("roofline", "fp32", ": later", "stopped"):
        assert words in said


def test_a_document_says_what_to_do_first_and_folds_what_cannot_be_best() -> None:
    pruned = a_row("unit e5m2", status="pruned", why="unit e4m3fn is no larger", gap=None)
    failed = a_row("unit fp16", status="failed", why="inf", gap=None)
    document = advice_document(an_advice(a_row(), failed, pruned))
    assert document.verdict is not None
    assert document.verdict.outcome == "passed"
    assert ": unit e4m3fn, rows" in document.verdict.text
    assert [code.lines for code in blocks_of(document, Code)] == [("lpconv x",)]
    table, *_ = blocks_of(document, Table)
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("unit e4m3fn, rows", "8 windows"), ("unit fp16", "failed: inf"),
    ]  # fmt: skip
    (folded,) = blocks_of(document, Folded)
    assert folded.title.startswith("1 ")
    assert folded.table.rows[0][0] == "unit e5m2"


def test_without_a_recommendation_the_verdict_is_no_pass() -> None:
    nothing = Recommendation(purpose="train", row=None, words="Nothing.", command=None)
    verdict = advice_document(an_advice(recommendations=(nothing,))).verdict
    assert verdict is not None
    assert verdict.outcome == "not run"
    assert "nothing" in verdict.text


def test_the_front_marks_what_is_recommended_and_leaves_out_what_was_not_measured() -> None:
    result = an_advice(a_row(), a_row("b", size_bytes=2_000_000), a_row("c", status="unmeasured", gap=None))
    chart = front_chart(result, "infer", "Inference")
    assert chart is not None
    assert {"budget", "unit e4m3fn, rows", "b"} < {m.title for m in chart.marks}
    assert sum("series-1" in m.kind for m in chart.marks) == 2  # its bar and its mark
    assert [text for *_, text in chart.labels] == ["unit e4m3fn, rows"]
    assert front_chart(replace(result, rows=result.rows[2:]), "infer", "Inference") is None


def test_in_the_front_gaps_below_zero_lie_below_it() -> None:
    result = an_advice(a_row(gap=gap(-0.002, 0.001)), a_row("b", size_bytes=2_000_000, gap=gap(0.2, 0.1)))
    chart = front_chart(result, "infer", "Inference")
    assert chart is not None
    heights = {t.label: t.at for t in chart.y.ticks}
    assert list(heights) == ["-0.001", "0", "0.001", "0.01", "0.1"]
    assert sorted(heights.values()) == list(heights.values())
    (_, top), (_, bottom) = chart.marks[2].points
    assert top == pytest.approx(heights["-0.001"])  # the upper end of -0.002 ± 0.001
    assert heights["0"] > top > bottom > chart.y.low
