"""Gates on figures that were measured, and on one that was not."""

import pytest

from lpconv.errors import UsageError
from lpconv.gates import CONVERT_GATES, VERIFY_GATES
from lpconv.results import GapEstimate, TaskCheck, VerifyResult, WeightsCheck

_WEIGHTS = WeightsCheck(
    max_rel_error=0.5, min_sqnr_db=25.0, worst="w", num_tensors=1, num_elements_checked=1, num_elements=1, mismatched=()
)


@pytest.mark.parametrize(
    ("expression", "passed"),
    [("sqnr>=25", True), ("sqnr>25", False), ("sqnr<=25", True), ("sqnr<25", False), ("sqnr==25", True)],
)
def test_a_bound_that_is_met_exactly(expression: str, passed: bool) -> None:
    result = VerifyResult(level="weights", passed=True, weights=_WEIGHTS)
    (record,) = CONVERT_GATES.check([CONVERT_GATES.parse(expression)], result)
    assert (record.value, record.passed) == (25.0, passed)


def test_a_figure_that_was_not_measured_fails_its_gate() -> None:
    (record,) = CONVERT_GATES.check([CONVERT_GATES.parse("kl<=1")], VerifyResult(level="weights", passed=True))
    assert (record.value, record.passed) == (None, False)


_DROP = GapEstimate(value=0.012, low=0.004, high=0.02, count=400, detectable=0.015)
_TASK = TaskCheck(
    task="arc_easy", metric="exact_match,strict-match", num_questions=400, score=0.5, source_score=0.512, drop=_DROP
)


@pytest.mark.parametrize(
    ("expression", "value", "passed"),
    [
        ("task:arc_easy:exact_match,strict-match_drop<=0.02", 0.012, True),
        ("task:arc_easy:exact_match,strict-match_drop<=0.014", 0.012, False),  # 400 questions would not show 0.014
        ("task:arc_easy:exact_match,strict-match_drop<=0", 0.012, False),
        ("task:arc_easy:exact_match,strict-match_drop>=0", 0.012, True),
        ("task:arc_easy:exact_match,strict-match_drop_high<=0.02", 0.02, True),
        ("task:arc_easy:acc_drop<=0.02", None, False),
    ],
)
def test_a_gate_on_a_task(expression: str, value: float | None, passed: bool) -> None:
    result = VerifyResult(level="weights", passed=True, tasks=(_TASK,))
    (record,) = VERIFY_GATES.check([VERIFY_GATES.parse(expression)], result)
    assert (record.value, record.passed) == (value, passed)


@pytest.mark.parametrize("bound", ["nan", "many"])
def test_a_bound_is_a_number(bound: str) -> None:
    with pytest.raises(UsageError, match="number"):
        CONVERT_GATES.parse(f"kl<={bound}")


@pytest.mark.parametrize("expression", ["task:arc_easy:acc_drop<=0.1", "sqnr:x>=1", "perplexity<=9", "reverse_kl<=1"])
def test_a_conversion_knows_no_tasks_and_no_text(expression: str) -> None:
    with pytest.raises(UsageError, match=r"unknown .*`"):
        CONVERT_GATES.parse(expression)
