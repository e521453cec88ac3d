"""Two processes measured in turn, A B B A …, so that whatever slows the machine for a while slows both."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lpconv.bench.child import Subject
from lpconv.bench.intervals import MIN_P99_SAMPLES, quantile, ratio_over_launches
from lpconv.bench.options import Effort
from lpconv.errors import VerificationError
from lpconv.results import RatioRecord, TimingRecord

__all__ = ["Samples", "interleave", "ratio_of", "timing_of"]


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


def interleave(baseline: Subject, variant: Subject | None, effort: Effort) -> tuple[Samples, Samples]:
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
        p99_s=quantile(times, 0.99) if len(times) >= MIN_P99_SAMPLES else None,
        wall_median_s=quantile([w for samples in launches for w in samples.walls], 0.5),
    )


def ratio_of(launches: Sequence[tuple[Samples, Samples]]) -> RatioRecord:
    """Baseline over variant with its interval, from the rounds that they took in turn, launch by launch."""
    return ratio_over_launches([(baseline.medians, variant.medians) for baseline, variant in launches])
