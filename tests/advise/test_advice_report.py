"""An advice on the terminal and as a page."""

import re
from dataclasses import replace

from lpconv.report.advise import advice_document, nearest, recommendation
from lpconv.report.document import Code, Table
from lpconv.results import Recommendation
from tests.helpers.advice_examples import a_row, an_advice, gap
from tests.helpers.report_examples import blocks_of, verdict_of


def test_the_recommendation_names_size_gap_and_budget() -> None:
    result = an_advice()
    words = recommendation(result, result.rows[0], "infer")
    figures = ("unit e4m3fn rows: 1.00 MB", "4.00 MB", "4.00x", " 8 ", "+0.0040", "+0.0020", "+0.0060", "0.01 nats")
    assert re.search(".*".join(map(re.escape, figures)), words)


def test_without_a_candidate_the_nearest_is_named() -> None:
    near, far = a_row("a", gap=gap(0.012, 0.003), meets=False, seconds=60.0), a_row("b", gap=gap(0.05, 0.001))
    result = an_advice(near, far)
    assert nearest(result, "infer") == near
    words = recommendation(result, None, "infer")
    assert " a " in words
    assert "+0.0120" in words
    assert "minutes=15" in words  # half of the 10 more, since 2.25 times as many windows take less
    for row, expected in (
        (replace(near, gap=gap(0.0101, 0.003)), "quality="),  # no time decides it
        (replace(far, meets=False), "Keep"),
        (replace(near, status="unmeasured", gap=None), "minutes="),
    ):
        assert expected in recommendation(an_advice(row), None, "infer")


def test_a_document_says_what_to_do_first_and_folds_what_cannot_be_best() -> None:
    pruned = a_row("unit e5m2", status="pruned", why="unit e4m3fn is no larger", gap=None)
    failed = a_row("unit fp16", status="failed", why="inf", gap=None)
    document = advice_document(an_advice(a_row(), failed, pruned))
    assert verdict_of(document).outcome == "passed"
    assert ": unit e4m3fn rows" in verdict_of(document).text
    assert [code.lines for code in blocks_of(document, Code)] == [("lpconv x",)]
    table, folded, *_ = blocks_of(document, Table)
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("unit e4m3fn rows", "8 windows"), ("unit fp16", "failed: inf"),
    ]  # fmt: skip
    assert folded.folded.startswith("1 ")
    assert folded.rows[0][0] == "unit e5m2"


def test_without_a_recommendation_the_verdict_is_no_pass() -> None:
    failed = a_row("GGUF_Q8_0", status="failed", why="tokenizer", gap=None)
    for purpose, near, said in (("train", "bf16-sr", "bf16-sr"), ("infer", None, "none")):
        nothing = Recommendation(purpose=purpose, row=None, words="Undecided.", command=None, nearest=near)
        verdict = verdict_of(advice_document(an_advice(failed, recommendations=(nothing,))))
        assert verdict.outcome == "not run"
        assert said in verdict.text
