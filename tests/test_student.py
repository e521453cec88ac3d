"""Quantiles of Student's t against printed tables and against the incomplete beta function of mpmath."""

import math

import mpmath
import pytest

from lpconv.student import estimate_mean, estimate_share, t_quantile


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


def _probability(counts: tuple[int, ...], shares: tuple[float, ...]) -> float:
    """Of a multinomial distribution."""
    logs = (c * math.log(p) - math.lgamma(c + 1) for c, p in zip(counts, shares, strict=True))
    return math.exp(math.lgamma(sum(counts) + 1) + sum(logs))


@pytest.mark.parametrize(("up", "down"), [(0.01, 0.01), (0.05, 0.01), (0.1, 0.05), (0.2, 0.2), (0.3, 0.05)])
def test_an_interval_of_shares_contains_the_truth_as_often_as_it_says(up: float, down: float) -> None:
    """Over every outcome of 40 questions, by its exact probability; Student's interval reaches 87 % for 5 and 1 %."""
    covered, count = 0.0, 40
    for ups in range(count + 1):
        for downs in range(count + 1 - ups):
            found = estimate_share(ups, downs, count)
            if found.low <= up - down <= found.high:
                covered += _probability((ups, downs, count - ups - downs), (up, down, 1 - up - down))
    assert covered >= 0.94


def test_an_interval_of_shares_approaches_students() -> None:
    ups, downs, count = 900, 600, 5000
    student = estimate_mean([1.0] * ups + [-1.0] * downs + [0.0] * (count - ups - downs))
    found = estimate_share(ups, downs, count)
    assert found.value == pytest.approx(student.value)
    assert found.high == pytest.approx(student.high, rel=1e-3)


def test_no_difference_still_has_an_interval() -> None:
    assert estimate_share(0, 0, 400).high == pytest.approx(0.0049, abs=1e-4)
    assert estimate_share(0, 0, 1).high == math.inf
