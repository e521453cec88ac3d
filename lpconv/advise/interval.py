"""Intervals of what was measured a few times."""

import math
import statistics
from collections.abc import Sequence

from lpconv.results import GapEstimate
from lpconv.student import t_quantile


def estimated(gaps: Sequence[float], confidence: float = 0.95) -> GapEstimate:
    """The mean of paired differences, with Student's interval, which has no ends for one or what is not finite."""
    mean, count = statistics.fmean(gaps), len(gaps)
    if count == 1 or not math.isfinite(mean):
        return GapEstimate(value=mean, low=-math.inf, high=math.inf, count=1)
    width = t_quantile(count - 1, confidence) * statistics.stdev(gaps) / count**0.5
    return GapEstimate(value=mean, low=mean - width, high=mean + width, count=count)
