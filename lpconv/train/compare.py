"""A run beside its twin, over seeds: the gap of each held-out metric, and whether it exceeds noise."""

import statistics
from collections.abc import Sequence

from lpconv.results import GapRecord, RunRecord
from lpconv.student import t_quantile

__all__ = ["gaps"]


def gaps(runs: Sequence[RunRecord]) -> tuple[GapRecord, ...]:
    """One record per held-out metric, from the last evaluation of every run that has a twin of its seed."""
    twins = {r.seed: _last(r) for r in runs if r.role == "twin"}
    pairs = [(_last(r), twins[r.seed]) for r in runs if r.role == "run" and r.seed in twins]
    if not pairs:
        return ()
    return tuple(_gap(metric, [(run[metric], twin[metric]) for run, twin in pairs]) for metric in pairs[0][0])


def _last(run: RunRecord) -> dict[str, float]:
    return {s.name: s.values[-1] for s in run.evaluations if s.values}


def _gap(metric: str, pairs: Sequence[tuple[float, float]]) -> GapRecord:
    """Paired: run and twin of a seed saw the same batches, so their difference varies less than either."""
    differences = [run - twin for run, twin in pairs]
    count = len(pairs)
    spread = statistics.stdev(differences) if count > 1 else None
    return GapRecord(
        metric=metric,
        run=statistics.fmean(run for run, _ in pairs),
        twin=statistics.fmean(twin for _, twin in pairs),
        gap=statistics.fmean(differences),
        half_width=None if spread is None else t_quantile(count - 1) * spread / count**0.5,
        noise=statistics.stdev(twin for _, twin in pairs) if count > 1 else None,
    )
