"""Quantiles of Student's t against the printed table."""

import pytest

from lpconv.student import t_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)]
)
def test_the_printed_table(freedom: int, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("freedom", "confidence", "expected"),
    [(1, 0.99, 63.657), (2, 0.98, 6.965), (3, 0.98, 4.541), (7, 0.99, 3.499), (63, 0.98, 2.387)],
)
def test_other_confidences(freedom: int, confidence: float, expected: float) -> None:
    assert t_quantile(freedom, confidence) == pytest.approx(expected, rel=0.02)
