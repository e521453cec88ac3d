"""What held-out figures are compared with, and how far they can be trusted."""

import math
import random
import statistics

import numpy as np
import pytest

from lpconv.results import EvaluationRecord, RunRecord, Series
from lpconv.train.examples import Stream
from lpconv.train.held_out import baselines
from lpconv.train.outcome import batch_error, gap_error, held_out_records


def classes(labels: list[int]) -> Stream:
    return Stream([{"input_ids": [0], "labels": y} for y in labels], len(labels), seed=0, shuffled=False)


def test_the_guess_names_the_largest_class_of_training() -> None:
    found = baselines([0, 1, 1, 1], classes([0, 0, 1, 0]), num_targets=2)
    assert found["eval_accuracy"] == 0.25  # 1 is the largest class where nobody may look at the answers
    assert found["eval_loss"] > math.log(2)
    even = baselines([0, 1] * 5000, classes([0, 1]), num_targets=2)
    assert even["eval_loss"] == pytest.approx(math.log(2), rel=1e-3)


def test_the_guess_of_tokens_is_their_entropy_and_finite_for_what_training_lacks() -> None:
    draw = np.random.default_rng(0)
    shares = np.array([0.5, 0.25, 0.125, 0.125])
    train, held_out = ([draw.choice(4, 1000, p=shares) for _ in range(20)] for _ in range(2))
    stream = Stream([{"input_ids": x} for x in held_out], 20, seed=0, shuffled=False, causal=True)
    found = baselines(train, stream, num_targets=4)
    entropy = -(shares * np.log(shares)).sum()
    assert found == {"eval_loss": pytest.approx(entropy, rel=0.02)}
    unseen = baselines(
        [np.zeros(10, dtype=int)], Stream([{"input_ids": [1, 2]}], 1, seed=0, causal=True), num_targets=4
    )
    assert math.isfinite(unseen["eval_loss"])


def test_only_masked_places_count() -> None:
    stream = Stream([{"input_ids": np.arange(10)}], 1, seed=0, shuffled=False, mask=99, keep=(1, 1))
    labels = stream[0]["labels"]
    found = baselines([np.arange(10)], stream, num_targets=100)
    assert (labels != -100).sum() < 10
    assert math.isfinite(found["eval_loss"])


def test_the_standard_error_is_the_spread_of_repeated_means() -> None:
    draw, sizes = random.Random(0), (8, 8, 8, 8, 8, 8, 8, 3)

    def evaluation() -> list[float]:
        return [statistics.fmean(draw.gauss(2, 1) for _ in range(size)) for size in sizes]

    trials = [evaluation() for _ in range(2000)]
    means = [statistics.fmean(t, weights=sizes) for t in trials]
    errors = [batch_error(t, sizes) for t in trials]
    squares = statistics.fmean(e**2 for e in errors if e is not None)
    assert math.sqrt(squares) == pytest.approx(statistics.stdev(means), rel=0.06)  # 3 standard errors of 2000 trials
    assert batch_error([1.0], [8]) is None
    assert batch_error([1.0, math.nan], [8, 8]) is None


def run(role: str, seed: int, after: tuple[float, ...]) -> RunRecord:
    series = Series(name="eval_loss", steps=(0, 4), values=(3.0, statistics.fmean(after)))
    ends = (EvaluationRecord(step=s, sizes=(4, 4), losses=x) for s, x in ((0, (3.0, 3.0)), (4, after)))
    return RunRecord(
        role=role, seed=seed, losses=series, evaluations=(series,), loss_scales=series, held_out=tuple(ends)
    )


def test_pairs_of_batches_tell_more_than_either_run() -> None:
    pairs = [(run("run", 0, (2.1, 1.1)), run("twin", 0, (2.0, 1.0)))]
    error = gap_error(pairs, "eval_loss")
    assert error == pytest.approx(0, abs=1e-12)  # the batches differ by 1, the pairs always by 0.1
    (of_run, of_twin) = held_out_records([*pairs[0]], {"eval_loss": 2.5}, num_examples=8, num_available=97)
    assert (of_run.role, of_twin.role) == ("run", "twin")
    assert of_run.before == 3.0
    assert of_run.after == pytest.approx(1.6)
    assert of_run.standard_error == pytest.approx(0.5)
    assert (of_run.num_examples, of_run.num_available, of_run.baseline) == (8, 97, 2.5)
    assert gap_error([(pairs[0][0], RunRecord(
        role="twin", seed=0, losses=pairs[0][0].losses, evaluations=(), loss_scales=pairs[0][0].losses))],
        "eval_loss") is None  # fmt: skip
