"""What a whole training will cost, from a few steps of it: gaps between a recipe and its twin, and their intervals.

The interval is that of one new run at the end of the training. Three things widen it:

- *Seeds.* Runs of one recipe differ from seed to seed; one run alone says nothing about another.
- *Drift.* Where the gap still changed in the second half of the steps, it may change as much with each doubling.
- *Lost updates.* A 16-bit optimizer that drops part of each intended update (1 - EDQ, arXiv 2405.03637 §4.2) may fall
  behind by that part of what the twin will still learn. It shows late, so that few steps do not measure it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from lpconv.advise.interval import estimated
from lpconv.results import GapEstimate, RunRecord

_METRIC = "eval_loss"


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A run beside its twin: the gap of held-out losses halfway and at the end, and what the twin learnt between.

    `kept` is the share of the intended updates that reached what is kept, 1 where nothing measured it.
    """

    half: float
    last: float
    learnt: float
    kept: float

    @classmethod
    def of(cls, run: RunRecord, twin: RunRecord) -> Self:
        """Of two finished runs of one seed."""
        ours, theirs = _losses(run), _losses(twin)
        kept = [u.edq for u in run.updates]
        return cls(
            half=ours[0] - theirs[0],
            last=ours[-1] - theirs[-1],
            learnt=theirs[0] - theirs[-1],
            kept=min(1.0, statistics.fmean(kept)) if kept else 1.0,
        )


def _losses(run: RunRecord) -> tuple[float, ...]:
    return next(s.values for s in run.evaluations if s.name == _METRIC)


def outlook(found: Sequence[Ends], *, steps: int, horizon: int) -> GapEstimate:
    """The gap of a recipe after `horizon` steps, from runs of `steps`; of one run the interval has no ends."""
    known = estimated([e.last for e in found])
    seeds = (known.high - known.value) * math.sqrt(known.count + 1)  # of one new run, not of their mean
    drift, behind = _later(found, math.log2(horizon / steps))
    return replace(known, low=known.value - seeds - drift, high=known.value + seeds + drift + behind)


def least_high(found: Sequence[Ends], *, steps: int, horizon: int) -> float:
    """The upper end of the gap of a recipe after `horizon` steps, if all seeds gave the same."""
    drift, behind = _later(found, math.log2(horizon / steps))
    return statistics.fmean(e.last for e in found) + drift + behind


def _later(found: Sequence[Ends], doublings: float) -> tuple[float, float]:
    """What the gap may change by in either direction, and what it may grow by, in the steps that are still to come."""
    drift = abs(statistics.fmean(e.last - e.half for e in found)) * doublings
    lost = 1 - statistics.fmean(e.kept for e in found)
    return drift, lost * max(0.0, statistics.fmean(e.learnt for e in found)) * doublings
