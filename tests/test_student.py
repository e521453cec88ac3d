"""Quantiles of Student's t against printed tables and against the incomplete beta function of mpmath."""

import mpmath
import pytest

from lpconv.student import t_quantile


@pytest.mark.parametrize(
    ("freedom", "at_95", "at_99"),
    [
        (1, 12.706205, 63.656741),
        (2, 4.302653, 9.924843),
        (3, 3.182446, 5.840909),
        (4, 2.776445, 4.604095),
        (5, 2.570582, 4.032143),
        (10, 2.228139, 3.169273),
        (30, 2.042272, 2.749996),
        (60, 2.000298, 2.660283),
        (100, 1.983972, 2.625891),
    ],
)
def test_printed_tables(freedom: int, at_95: float, at_99: float) -> None:
    assert t_quantile(freedom) == pytest.approx(at_95, abs=1e-6)
    assert t_quantile(freedom, 0.99) == pytest.approx(at_99, abs=1e-6)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_the_quantile_inverts_the_incomplete_beta_function(confidence: float) -> None:
    for freedom in range(1, 101):
        t = t_quantile(freedom, confidence)
        outside = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True)
        assert float(outside) == pytest.approx(1 - confidence, rel=1e-10), freedom


def test_many_degrees_of_freedom_approach_the_normal_distribution() -> None:
    assert t_quantile(10**5) == pytest.approx(1.959964, abs=5e-5)
