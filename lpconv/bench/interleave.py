"""Two processes measured in turn, A B B A …, so that whatever slows the machine for a while slows both.

Their times become medians, quantiles, and intervals of a ratio that neither drift nor a lucky process can narrow.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lpconv.bench.options import Effort
from lpconv.bench.team import MeasuredProcess
from lpconv.errors import UsageError, VerificationError
from lpconv.results import RatioRecord, TimingRecord
from lpconv.student import t_quantile

_MIN_P99_SAMPLES = 100
_RESAMPLES = 2000


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample quantile with linear interpolation; UsageError of nothing."""
    if not samples:
        raise UsageError("no samples to summarise", hint="ask for at least one iteration")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def bootstrap_ratio(baseline: Sequence[float], variant: Sequence[float], *, seed: int = 0) -> RatioRecord:
    """Baseline time over variant time, from the median times of interleaved rounds, with a 95 % bootstrap interval.

    The two sequences belong together round by round: what slows the machine in a round slows both, so rounds are
    resampled whole. The value is the geometric mean of the rounds' ratios without their largest and smallest fifths (a
    burst of foreign load hits one side of a round). The percentiles are widened for the small number of rounds, as
    Hesterberg 2015 (arXiv 1411.5279) expands them: α/2 becomes Φ(-√(n/(n-1)) · t_{α/2,n-1}). With one round the
    interval is that one number.
    """
    if not baseline or len(baseline) != len(variant):
        raise UsageError(
            f"{len(baseline)} rounds of the baseline and {len(variant)} of the variant",
            hint="both need the same number of rounds, and at least one",
        )
    logs = [math.log(b / v) for b, v in zip(baseline, variant, strict=True)]
    value = math.exp(_trimmed_mean(logs))
    n = len(logs)
    if n == 1:
        return RatioRecord(value=value, low=value, high=value)
    draw = random.Random(seed)
    means = [_trimmed_mean(draw.choices(logs, k=n)) for _ in range(_RESAMPLES)]
    tail = statistics.NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(n - 1))
    return RatioRecord(
        value=value,
        low=min(math.exp(quantile(means, tail)), value),
        high=max(math.exp(quantile(means, 1 - tail)), value),
    )


def ratio_over_launches(launches: Sequence[tuple[Sequence[float], Sequence[float]]]) -> RatioRecord:
    """Baseline time over variant time, from the round medians of several launches of both processes.

    How a process lies in memory makes it some percent faster or slower for as long as it lives, which no number of
    rounds averages out. Each launch therefore gives one value, as in `bootstrap_ratio`; the result is their geometric
    mean, with the 95 % interval of Student's t. One launch has only the interval of its rounds.
    """
    if len(launches) == 1:
        return bootstrap_ratio(*launches[0])
    logs = [math.log(bootstrap_ratio(b, v).value) for b, v in launches]
    middle = statistics.fmean(logs)
    half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return RatioRecord(value=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = len(values) // 5
    kept = sorted(values)[cut : len(values) - cut]
    return statistics.fmean(kept)


@dataclass(kw_only=True)
class Samples:
    """Step times of one case, round by round, and the wall time of a step in each round."""

    rounds: list[list[float]] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    recompiles: int = 0

    @property
    def medians(self) -> list[float]:
        """The median step time of each round."""
        return [statistics.median(r) for r in self.rounds]


def interleave(baseline: MeasuredProcess, variant: MeasuredProcess | None, effort: Effort) -> tuple[Samples, Samples]:
    """Warm both up, then measure them in turn; without a variant, the baseline alone.

    Raises VerificationError where torch.compile ran again after the warm-up: such times mean nothing.
    """
    found = Samples(), Samples()
    subjects = [(baseline, found[0])] + ([(variant, found[1])] if variant is not None else [])
    for subject, _ in subjects:
        subject.ask("warm_up", iterations=effort.warm_up_iterations, seconds=effort.warm_up_seconds)
    iterations = math.ceil(effort.min_iterations / effort.rounds)
    seconds = effort.min_seconds / effort.rounds
    for i in range(effort.rounds):
        for subject, samples in subjects if i % 2 == 0 else reversed(subjects):
            answer = subject.ask("measure", iterations=iterations, seconds=seconds)
            samples.rounds.append(answer["seconds"])
            samples.walls.append(answer["wall"])
            samples.recompiles = answer["recompiles"]
            _check_recompiles(samples)
    return found


def _check_recompiles(samples: Samples) -> None:
    if samples.recompiles:
        raise VerificationError(
            f"torch.compile compiled {samples.recompiles} times after the warm-up; the times are not those of a step",
            hint="measure with --compile off, or report the model to lpconv",
        )


def timing_of(launches: Sequence[Samples], device: str) -> TimingRecord:
    """All samples in one record."""
    rounds = [r for samples in launches for r in samples.rounds]
    times = [t for r in rounds for t in r]
    return TimingRecord(
        num_samples=len(times),
        num_rounds=len(rounds),
        num_launches=len(launches),
        clock="wall" if device == "cpu" else "CUDA events",
        median_s=quantile(times, 0.5),
        p10_s=quantile(times, 0.1),
        p90_s=quantile(times, 0.9),
        p99_s=quantile(times, 0.99) if len(times) >= _MIN_P99_SAMPLES else None,
        wall_median_s=quantile([w for samples in launches for w in samples.walls], 0.5),
    )


def ratio_of(launches: Sequence[tuple[Samples, Samples]]) -> RatioRecord:
    """Baseline over variant with its interval, from the rounds that they took in turn, launch by launch."""
    return ratio_over_launches([(baseline.medians, variant.medians) for baseline, variant in launches])
