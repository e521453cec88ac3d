"""LogMax: it follows the gradients, and comes back from an overflow."""

import math
import random

import pytest

from lpconv.errors import UsageError
from lpconv.loss_scale import LossScale, make_loss_scale

STEPS = 1500


def train(scale: LossScale, mean: float, deviation: float, *, steps: int = STEPS, seed: int = 0) -> list[int]:
    """Updates from steps whose largest gradient is 2^N(mean, deviation²); the steps that overflow fp16."""
    draw = random.Random(seed)
    skipped = []
    for step in range(steps):
        largest = 2.0 ** draw.gauss(mean, deviation)
        overflow = largest * scale.scale >= 65520
        scale.update(overflow, max_gradient=math.inf if overflow else largest)
        if overflow:
            skipped.append(step)
    return skipped


@pytest.mark.parametrize("deviation", [0.0, 0.5, 2.0])
def test_it_comes_back_from_an_overflow_within_50_steps(deviation: float) -> None:
    scale = make_loss_scale("logmax")
    train(scale, -4.0, deviation)
    before = scale.scale

    scale.update(True)
    assert scale.scale < before
    train(scale, -4.0, deviation, steps=50, seed=1)

    assert scale.scale >= before / 2
    assert scale.scale >= 2.0**10


@pytest.mark.parametrize("deviation", [0.2, 0.5, 1.0, 2.0])
def test_it_leaves_the_margin_of_its_formula_and_rarely_overflows(deviation: float) -> None:
    scale = make_loss_scale("logmax")
    skipped = train(scale, -2.0, deviation, steps=4000)
    margin = 16 - (-2.0) - math.log2(scale.scale)
    assert margin == pytest.approx(3.09 * max(deviation, 0.5), abs=1.5)
    assert len(skipped) < 0.01 * 4000


def test_it_follows_gradients_that_rise_for_good_within_a_few_skipped_steps() -> None:
    scale = make_loss_scale("logmax")
    train(scale, -8.0, 0.3)
    skipped = train(scale, 0.0, 0.3)
    assert 1 <= len(skipped) <= 5
    assert max(skipped) < 20


def test_scales_are_powers_of_two_within_the_bounds() -> None:
    scale = make_loss_scale("logmax", smallest=2.0, init_scale=8.0, largest=2.0**12)
    train(scale, 30.0, 3.0, steps=30)
    assert scale.scale == 2.0
    train(scale, -40.0, 3.0, steps=300)
    assert scale.scale == 2.0**12
    assert all(math.frexp(s)[0] == 0.5 for _, s in scale.history)


def test_a_floor_lifts_the_prediction() -> None:
    scale = make_loss_scale("logmax", floor="10:256")
    train(scale, 12.0, 0.1, steps=9)
    assert scale.scale < 256
    scale.update(False, max_gradient=2.0**12)
    assert scale.scale == 256


def test_gradients_of_zero_change_nothing() -> None:
    scale = make_loss_scale("logmax")
    scale.update(False, max_gradient=0.0)
    assert scale.scale == 2.0**14


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, -1.0])
def test_a_finite_step_without_its_statistic_is_refused(wrong: float | None) -> None:
    with pytest.raises(UsageError, match="max_gradient"):
        make_loss_scale("logmax").update(False, max_gradient=wrong)
