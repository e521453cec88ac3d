"""Medians, quantiles, and intervals of a ratio that neither drift nor a lucky process can narrow."""

import math
import random
import statistics
from collections.abc import Sequence

from lpconv.errors import UsageError
from lpconv.results import RatioRecord
from lpconv.student import t_quantile

__all__ = ["MIN_P99_SAMPLES", "bootstrap_ratio", "quantile", "ratio_over_launches"]

MIN_P99_SAMPLES = 100
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
