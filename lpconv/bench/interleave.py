"""Measure two cases in turn, A B B A …, so that temporary slowdowns of the machine affect both.

Step times are summarised as medians, quantiles, and ratio intervals that account for drift and for luck in memory
layout.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lpconv.bench.options import Effort
from lpconv.bench.team import Team
from lpconv.errors import UsageError, VerificationError
from lpconv.results import RatioRecord, TimingRecord
from lpconv.student import estimate_mean, t_quantile

_MIN_P99_SAMPLES = 100
_RESAMPLES = 2000


def bootstrap_ratio(baseline: Sequence[float], variant: Sequence[float], *, seed: int = 0) -> RatioRecord:
    """Ratio of baseline time to variant time over interleaved rounds (median times), with a 95 % bootstrap interval.

    The sequences are paired by round: a slowdown of the machine affects both sides, so whole rounds are resampled. The
    value is the geometric mean of the rounds' ratios without their largest and smallest fifths (a burst of other load
    hits one side of a round). The percentiles are widened for small samples, as in Hesterberg 2015 (arXiv 1411.5279):
    α/2 becomes Φ(-√(n/(n-1)) · t_{α/2,n-1}). With one round the interval is that single ratio.
    """
    if not baseline or len(baseline) != len(variant):
        raise UsageError(
            f"the baseline has {len(baseline)} rounds and the variant {len(variant)}",
            hint="both need the same number of rounds, at least one",
        )
    logs = [math.log(b / v) for b, v in zip(baseline, variant, strict=True)]
    value = math.exp(_trimmed_mean(logs))
    n = len(logs)
    if n == 1:
        return RatioRecord(value=value, low=value, high=value)
    draw = random.Random(seed)
    means = [_trimmed_mean(draw.choices(logs, k=n)) for _ in range(_RESAMPLES)]
    tail = statistics.NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(n - 1))
    low, high = np.exp(np.quantile(means, (tail, 1 - tail))).tolist()
    return RatioRecord(value=value, low=min(low, value), high=max(high, value))


def ratio_over_launches(launches: Sequence[tuple[Sequence[float], Sequence[float]]]) -> RatioRecord:
    """Ratio of baseline time to variant time over several launches of both processes (round medians).

    The memory layout of a process makes it some per cent faster or slower for its whole life, which no number of rounds
    averages out. Each launch therefore gives one value, as in `bootstrap_ratio`; the result is their geometric mean,
    with the 95 % interval of Student's t. With one launch the interval is that of its rounds.
    """
    if len(launches) == 1:
        return bootstrap_ratio(*launches[0])
    log = estimate_mean([math.log(bootstrap_ratio(b, v).value) for b, v in launches])
    return RatioRecord(value=math.exp(log.value), low=math.exp(log.low), high=math.exp(log.high))


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = len(values) // 5
    middle = sorted(values)[cut : len(values) - cut]
    return statistics.fmean(middle)


@dataclass(kw_only=True)
class Samples:
    """Step times of one case by round, and the wall time of a step in each round."""

    rounds: list[list[float]] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    recompiles: int = 0

    @property
    def medians(self) -> list[float]:
        """The median step time of each round."""
        return [statistics.median(r) for r in self.rounds]


def interleave(baseline: Team, variant: Team | None, effort: Effort) -> tuple[Samples, Samples]:
    """Warm both cases up, then measure them in turn. Without a variant, measure only the baseline.

    Raises VerificationError if torch.compile runs again after the warm-up, which would spoil the times.
    """
    pair = Samples(), Samples()
    subjects = [(baseline, pair[0])] + ([(variant, pair[1])] if variant is not None else [])
    for subject, _ in subjects:
        subject.ask("measure", iterations=effort.warm_up_iterations, seconds=effort.warm_up_seconds)
    iterations = math.ceil(effort.min_iterations / effort.rounds)
    seconds = effort.min_seconds / effort.rounds
    for i in range(effort.rounds):
        for subject, samples in subjects if i % 2 == 0 else reversed(subjects):
            answer = subject.ask("measure", iterations=iterations, seconds=seconds)
            samples.rounds.append(answer["seconds"])
            samples.walls.append(answer["wall"])
            samples.recompiles = answer["recompiles"]
            if samples.recompiles:
                raise VerificationError(
                    f"torch.compile recompiled {samples.recompiles} times after the warm-up, so no step time is valid",
                    hint="measure with --compile off, and please report the model",
                )
    return pair


def timing_of(launches: Sequence[Samples], device: str) -> TimingRecord:
    """Statistics over the samples of all launches."""
    rounds = [r for samples in launches for r in samples.rounds]
    times = [t for r in rounds for t in r]
    p10_s, p90_s, p99_s = np.quantile(times, (0.1, 0.9, 0.99)).tolist()
    return TimingRecord(
        num_samples=len(times),
        num_rounds=len(rounds),
        num_launches=len(launches),
        clock="wall" if device == "cpu" else "CUDA events",
        median_s=statistics.median(times),
        p10_s=p10_s,
        p90_s=p90_s,
        p99_s=p99_s if len(times) >= _MIN_P99_SAMPLES else None,
        wall_median_s=statistics.median(w for samples in launches for w in samples.walls),
    )
