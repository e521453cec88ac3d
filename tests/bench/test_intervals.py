"""The interval of a ratio: right where the answer is known, honest where noise is shared."""

import random

import pytest

from lpconv.bench.interleave import bootstrap_ratio, ratio_over_launches
from lpconv.errors import UsageError


def noisy(rng: random.Random, seconds: float, rounds: int) -> list[float]:
    return [seconds * rng.lognormvariate(0, 0.05) for _ in range(rounds)]


def test_the_interval_of_equal_times_contains_one_nineteen_times_of_twenty() -> None:
    rng = random.Random(1)
    trials = 200

    hits = sum(
        r.low <= 1 <= r.high for r in (bootstrap_ratio(noisy(rng, 1, 12), noisy(rng, 1, 12)) for _ in range(trials))
    )

    assert hits / trials > 0.95 - 3 * (0.95 * 0.05 / trials) ** 0.5  # three sigma of a binomial


def test_drift_that_both_feel_leaves_the_ratio_alone() -> None:
    drift = [1.0, 1.5, 3.0, 2.0, 1.0, 5.0, 1.0, 4.0]

    ratio = bootstrap_ratio([2 * d for d in drift], drift)

    assert ratio.value == pytest.approx(2)
    assert ratio.high - ratio.low < 1e-9


def test_one_burst_of_foreign_load_does_not_move_the_ratio() -> None:
    assert bootstrap_ratio([1.0] * 12, [1.0] * 11 + [50.0]).value == pytest.approx(1)


@pytest.mark.parametrize(("baseline", "variant"), [([], []), ([1.0], []), ([1.0, 1.0], [1.0])])
def test_rounds_that_do_not_belong_together_are_refused(baseline: list[float], variant: list[float]) -> None:
    with pytest.raises(UsageError):
        bootstrap_ratio(baseline, variant)


def launches(rng: random.Random, number: int) -> list[tuple[list[float], list[float]]]:
    """Each launch of a process has a speed of its own, 2 % up or down; rounds differ by 0.5 %."""

    def rounds() -> list[float]:
        speed = rng.lognormvariate(0, 0.02)
        return [speed * rng.lognormvariate(0, 0.005) for _ in range(4)]

    return [(rounds(), rounds()) for _ in range(number)]


def test_launches_show_what_rounds_of_one_process_cannot() -> None:
    rng = random.Random(3)
    trials = [launches(rng, 3) for _ in range(200)]

    of_one = [ratio_over_launches(t[:1]) for t in trials]
    of_three = [ratio_over_launches(t) for t in trials]

    assert sum(r.low <= 1 <= r.high for r in of_one) / 200 < 0.6
    assert sum(r.low <= 1 <= r.high for r in of_three) / 200 > 0.95 - 3 * (0.95 * 0.05 / 200) ** 0.5


def test_launches_average_to_the_ratio() -> None:
    ratio = ratio_over_launches([([2.0], [1.0]), ([8.0], [1.0])])

    assert ratio.value == pytest.approx(4)
    assert ratio.low < 2
    assert ratio.high > 8
