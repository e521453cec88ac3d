"""Gates on figures that were measured, and on one that was not."""

import pytest

from lpconv.gates import CONVERT_GATES
from lpconv.results import VerifyResult, WeightsCheck

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
