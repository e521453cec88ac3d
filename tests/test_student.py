"""Quantiles of Student's t against the incomplete beta function of mpmath."""

import math

import mpmath
import pytest
import torch

from lpconv.student import detectable, estimate_mean, estimate_share, t_quantile, with_plan


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_the_quantile_inverts_the_incomplete_beta_function(confidence: float) -> None:
    for freedom in range(1, 101):
        t = t_quantile(freedom, confidence)
        assert t > 0
        outside = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t**2), regularized=True)
        assert float(outside) == pytest.approx(1 - confidence, rel=1e-10), freedom


def test_many_degrees_of_freedom_approach_the_normal_distribution() -> None:
    assert t_quantile(10**5) == pytest.approx(1.959964, abs=5e-5)


def _probability(counts: tuple[int, ...], shares: tuple[float, ...]) -> float:
    """Of a multinomial distribution."""
    logs = (c * math.log(p) - math.lgamma(c + 1) for c, p in zip(counts, shares, strict=True))
    return math.exp(math.lgamma(sum(counts) + 1) + sum(logs))


@pytest.mark.parametrize(
    ("up", "down", "count"),
    [(0.01, 0.01, 40), (0.05, 0.01, 40), (0.1, 0.05, 40), (0.2, 0.2, 40), (0.3, 0.05, 40), (0.114, 0.006, 20)],
)
def test_an_interval_of_shares_contains_the_truth_as_often_as_it_says(up: float, down: float, count: int) -> None:
    """Over every outcome, by its exact probability. Student's interval reaches 87 % for 40 questions, 5 and 1 %, and
    that of Agresti and Min 91 % for the last case."""
    covered = 0.0
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


def test_the_interval_of_shares_is_the_published_one() -> None:
    """By Fagerland, Lydersen and Laake, Statistics in Medicine 33 (2014): 8 of 21 children whose airways changed."""
    found = estimate_share(1, 7, 21)
    assert (found.low, found.high) == pytest.approx((-0.517, -0.026), abs=5e-4)
    swapped = estimate_share(7, 1, 21)
    assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low))


@pytest.mark.parametrize(("up", "down", "count"), [(10, 10, 40), (41, 16, 400), (0, 3, 50)])
def test_a_score_test_just_rejects_the_ends_of_the_interval(up: int, down: int, count: int) -> None:
    """With the likeliest probabilities that have this difference, found on a grid."""
    end = estimate_share(up, down, count).high
    q = torch.linspace(max(-end, 0) + 1e-9, (1 - end) / 2 - 1e-9, 1_000_001, dtype=torch.float64)
    likely = torch.xlogy(torch.tensor(up), q + end) + torch.xlogy(torch.tensor(down), q)
    best = float(q[(likely + (count - up - down) * (1 - 2 * q - end).log()).argmax()])
    error = math.sqrt((2 * best + end - end**2) / count)
    assert (end - (up - down) / count) / error == pytest.approx(1.959964, rel=1e-4)


def test_no_difference_still_has_an_interval() -> None:
    """Up to Wilson's bound of a share that was never seen."""
    assert estimate_share(0, 0, 400).high == pytest.approx(1.96**2 / (400 + 1.96**2), rel=1e-4)
    assert estimate_share(0, 0, 1).detectable == math.inf


def test_a_planned_number_of_pairs_shows_the_difference_in_80_per_cent_of_cases() -> None:
    """Normal differences, 0.15 of their deviation from 0: 0.8 ± 3 standard errors over 2,000 samples."""
    draws = torch.Generator().manual_seed(0)
    pilot = estimate_mean((torch.randn(100_000, generator=draws, dtype=torch.float64) * 2).tolist())
    planned = with_plan(pilot, 0.3)
    assert planned is not None
    count = planned.num_needed
    assert count is not None
    samples = 0.3 + 2 * torch.randn(2000, count, generator=draws, dtype=torch.float64)
    shown = sum(estimate_mean(sample.tolist()).low > 0 for sample in samples)
    assert shown / 2000 == pytest.approx(0.8, abs=0.027)
    assert detectable(2 / count**0.5, count) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize("wanted", [0.1, 0.5, 0.9, 1.0, 2.0, 4.0])
def test_a_plan_of_few_pairs_is_the_smallest_number_that_shows_the_difference(wanted: float) -> None:
    pilot = with_plan(estimate_mean([-1.0, 0.0, 1.0, 0.0, 2.0]), wanted)
    assert pilot is not None
    assert pilot.deviation is not None
    deviation, shown = pilot.deviation, range(2, 3000)
    expected = next(n for n in shown if detectable(deviation / n**0.5, n) <= wanted)
    assert pilot.num_needed == expected
