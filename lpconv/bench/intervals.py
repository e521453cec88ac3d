"""Medians, quantiles, and an interval of a ratio that drift cannot narrow."""

import math
import random
import statistics
from collections.abc import Sequence

from lpconv.errors import UsageError
from lpconv.results import RatioRecord

__all__ = ["MIN_P99_SAMPLES", "bootstrap_ratio", "quantile"]

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
    tail = statistics.NormalDist().cdf(-math.sqrt(n / (n - 1)) * _t_quantile(n - 1))
    return RatioRecord(
        value=value,
        low=min(math.exp(quantile(means, tail)), value),
        high=max(math.exp(quantile(means, 1 - tail)), value),
    )


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = len(values) // 5
    kept = sorted(values)[cut : len(values) - cut]
    return statistics.fmean(kept)


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by the Cornish-Fisher expansion; within 2 % from three degrees on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
