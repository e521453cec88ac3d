"""A verification as a document: its outcome, what each step found, and which tensors are shown."""

import math
import re
from typing import Any

import pytest

from lpconv.report.document import Checks, Document, Table
from lpconv.report.verify import failure_text, verify_document
from lpconv.results import (
    ComparedTensor,
    GapEstimate,
    GateRecord,
    HashCheck,
    LogitsCheck,
    TaskCheck,
    Verification,
    VerifyResult,
    WeightsCheck,
)
from tests.helpers.report_examples import blocks_of, charts_of, section_of, verdict_of


def described(**fields: Any) -> Document:
    return verify_document(Verification(path="out/x", command="lpconv verify out/x", version="1", **fields))


def steps(document: Document) -> dict[str, tuple[str, str]]:
    return {c.name: (c.outcome, c.text) for checks in blocks_of(document, Checks) for c in checks.checks}


def weights(**fields: Any) -> WeightsCheck:
    made: dict[str, Any] = {"max_rel_error": 1.0, "min_sqnr_db": 3.0, "worst": "a", "num_tensors": 2}
    return WeightsCheck(**made | {"num_elements_checked": 8} | fields)


def test_every_step_of_a_failure_says_what_failed() -> None:
    document = described(
        level="weights",
        passed=False,
        hash=HashCheck(num_files=3, mismatched=("model.safetensors",)),
        weights=weights(mismatched=("a",)),
        logits=LogitsCheck(skipped="no config.json"),
        gates=(GateRecord(expression="sqnr>=25", value=3.0, passed=False),),
    )
    assert verdict_of(document).outcome == "failed"
    assert section_of(document, "Verification: failed (level weights)").outcome == "failed"
    found = steps(document)
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "hashes": "failed", "weights": "failed", "outputs": "not run", "gate sqnr>=25": "failed",
    }  # fmt: skip
    assert re.search(r"1 of 3 .*: model\.safetensors$", found["hashes"][1])
    assert re.search(r"1 of 2 .*: a$", found["weights"][1])
    assert "config.json" in found["outputs"][1]
    assert found["gate sqnr>=25"][1].endswith(" 3")


@pytest.mark.parametrize("difference", [math.nan, math.inf])
def test_outputs_that_are_not_finite_are_no_pass(difference: float) -> None:
    check = LogitsCheck(max_abs_diff=difference, rel_error=difference, bit_equal=False)
    outcome, text = steps(described(level="logits", passed=False, logits=check))["outputs"]
    assert outcome == "failed"
    assert "NaN" in text
    assert "within" not in text


def test_no_verification_is_not_a_pass() -> None:
    document = described(level="none", passed=True)
    assert verdict_of(document).outcome == "not run"
    assert not steps(document)
    assert section_of(document, "Verification: not run").blocks


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (LogitsCheck(bit_equal=True, max_abs_diff=0.0), "bit-equal"),
        (LogitsCheck(skipped="config"), "weights: 40 tensors"),
        (LogitsCheck(rel_error=0.25, is_text=True), " 0.25 "),
        (LogitsCheck(rel_error=0.25, mean_kl=0.005, is_text=True), " 0.005 nats (hardly"),
        # Random inputs say nothing about quality.
        (LogitsCheck(rel_error=0.25, mean_kl=0.5, top1_agreement=0.797), "weights: 40 tensors"),
    ],
)
def test_the_verdict_has_the_deepest_evidence(check: LogitsCheck, words: str) -> None:
    exact = weights(max_rel_error=0.0, min_sqnr_db=math.inf, worst=None, num_tensors=40)
    document = described(level="logits", passed=True, weights=exact, logits=check)
    assert words in verdict_of(document).text
    assert "40 tensors" in steps(document)["weights"][1]
    assert "79.7" not in steps(document)["outputs"][1]
    assert not {"KL divergence on text", "Same top prediction"} & {t.label for t in document.tiles} or check.is_text


@pytest.mark.parametrize(
    ("checked", "words"), [(134_515_008, "all 134,515,008"), (52_905_792, r"52,905,792 \w+ \(39\.3 % .*0\.61")]
)
def test_a_sample_does_not_read_as_a_failure(checked: int, words: str) -> None:
    sample = weights(num_elements=134_515_008, num_elements_checked=checked, miss_probability=0.61, max_rel_error=4e4)
    worst = ComparedTensor(name="a", stored_as="e4m3fn codes", reference="F32", sqnr_db=3.0, max_rel_error=4e4)
    text = steps(described(level="weights", passed=True, weights=sample, tensors=(worst,)))["weights"][1]
    assert re.search(f"^no .* {words}", text)
    assert re.search(r" 3\.0 dB .*e4m3fn .* 31 \w+ 32\)$", text)
    assert "e+04" not in text


def test_a_terminal_gets_the_tensors_that_are_not_exact_and_a_page_all() -> None:
    tensors = tuple(
        ComparedTensor(name=f"{db}.weight", stored_as="F32", reference="F32", sqnr_db=db, max_rel_error=0.0)
        for db in (30.0, math.inf)
    )
    document = described(level="values", passed=True, tensors=tensors)
    shown = {s.only: b.rows for s in document.sections for b in s.blocks if isinstance(b, Table)}
    assert [row[0] for row in shown["terminal"]] == ["30.0.weight"]
    assert [row[0] for row in shown["page"]] == ["30.0.weight", "inf.weight"]
    assert charts_of(document)["Signal-to-noise ratio of every tensor"].y.ticks[-1].label == "exact"
    exact = described(level="values", passed=True, tensors=tensors[1:])
    assert not [s for s in exact.sections if s.only == "terminal"]


def test_an_error_names_the_first_problems_and_counts_the_rest() -> None:
    gate = GateRecord(expression="sqnr>=99", value=31.290275432845675, passed=False)
    failed = VerifyResult(level="weights", passed=False, problems=tuple("ab"), gates=(gate,) * 3)
    assert re.fullmatch("a; b; .*sqnr>=99.*31.3; and 2 more", failure_text(failed))


def test_answers_to_tasks_are_a_step_a_headline_and_a_table() -> None:
    drop = GapEstimate(value=0.025, low=0.005, high=0.045, count=400, detectable=0.028)
    task = TaskCheck(
        task="quiz", metric="acc", num_questions=400, score=0.5, source_score=0.525, drop=drop, num_lost=14, num_won=4
    )
    document = described(level="weights", passed=True, weights=weights(), tasks=(task,))
    outcome, said = steps(document)["task"]
    assert outcome == "passed"
    assert re.match(r"loses 2\.5 \(0\.5 to 4\.5\) points .*quiz \(acc, 400 .*2\.8 points", said)
    tile = next(t for t in document.tiles if t.label == "quiz, acc")
    assert tile.figure == "-2.5 (-4.5 to -0.5) points"
    (table,) = (b for b in section_of(document, "Answers to tasks").blocks if isinstance(b, Table))
    assert table.rows == (
        ("quiz", "acc", "400", "52.5 %", "50 %", "-2.5 (-4.5 to -0.5) points", "2.8 points", "14", "4"),
    )
