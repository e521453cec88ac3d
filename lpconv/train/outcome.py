"""Evaluate a fine-tuning: held-out metrics and their errors, the gap between run and twin, and gates."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from lpconv.errors import UsageError, VerificationError
from lpconv.gates import FINETUNE_GATES, Gate
from lpconv.report.document import failed_gates
from lpconv.results import EvaluationRecord, FinetuneResult, GapRecord, HeldOutRecord, RunRecord, to_json
from lpconv.student import detectable, t_quantile
from lpconv.train.options import FinetuneOptions
from lpconv.train.recoverable import is_adapter

Figures = tuple[float, ...]
_FIGURES: dict[str, Callable[[EvaluationRecord], Figures]] = {
    "eval_loss": lambda e: e.losses,
    "eval_accuracy": lambda e: e.accuracies,
}


def parse_gates(options: FinetuneOptions) -> tuple[Gate, ...]:
    """The gates of a run. Raises UsageError for invalid gates and for those on metrics that it will not measure."""
    gates = tuple(map(FINETUNE_GATES.parse, options.gates))
    merges = bool(options.source and is_adapter(options.source))
    for gate in gates:
        if gate.metric == "update_kept" and not merges:
            raise UsageError(f"gate `{gate.expression}` needs an adapter", hint="use `lpconv merge MODEL ADAPTER`")
        if "gap" in gate.metric and options.arithmetic.on_codes:
            what, also = ("adapters", "update_kept, ") if merges else ("--recover", "")
            raise UsageError(f"gate `{gate.expression}` does not apply to {what}", hint=f"use {also}loss or accuracy")
        if "gap" in gate.metric and options.twin == "none":
            raise UsageError(f"gate `{gate.expression}` needs a twin", hint="use --twin fp32 or --twin bf16")
        if gate.metric == "loss_gap_low" and options.seeds == 1:
            raise UsageError(f"gate `{gate.expression}` needs a confidence interval", hint="pass --seeds 3")
    return gates


def gate_problem(result: FinetuneResult) -> VerificationError | None:
    """The error for failed gates, or None. The trained model and the report are kept."""
    if not (failed := failed_gates(result.gates)):
        return None
    return VerificationError(
        "; ".join(failed),
        hint=f"the model and its report are in `{result.output}`",
        details={"gates": to_json(result.gates)},
    )


def gap_records(runs: Sequence[RunRecord]) -> tuple[GapRecord, ...]:
    """One record per held-out metric, from the last evaluation of every run with a twin of the same seed."""
    twins = {r.seed: r for r in runs if r.role == "twin"}
    pairs = [(r, twins[r.seed]) for r in runs if r.role == "run" and r.seed in twins]
    metrics = [s.name for s in pairs[0][0].evaluations if s.values] if pairs else []
    named = [{s.name for s in r.evaluations if s.values} for pair in pairs for r in pair]
    return tuple(_gap(metric, pairs) for metric in metrics if all(metric in names for names in named))


def _gap(metric: str, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> GapRecord:
    """The gap of one metric over pairs of run and twin; both see the same batches, which reduces variance."""
    ends = [(_last(run, metric), _last(twin, metric)) for run, twin in pairs]
    differences = [run - twin for run, twin in ends]
    count = len(pairs)
    spread = statistics.stdev(differences) if count > 1 else None
    return GapRecord(
        metric=metric,
        run=statistics.fmean(run for run, _ in ends),
        twin=statistics.fmean(twin for _, twin in ends),
        gap=statistics.fmean(differences),
        half_width=None if spread is None else t_quantile(count - 1) * spread / count**0.5,
        noise=statistics.stdev(twin for _, twin in ends) if count > 1 else None,
        standard_error=gap_error(pairs, metric),
        detectable=None if spread is None else detectable(spread / count**0.5, count),
    )


def _last(run: RunRecord, metric: str) -> float:
    return next(s.values[-1] for s in run.evaluations if s.name == metric)


def batch_error(values: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Standard error of a mean over targets, from means over batches of the given sizes; None with one batch.

    Uses the formula for a weighted mean of clusters (Cochran, Sampling Techniques, section 9A.1, without the correction
    for a finite population).
    """
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return None
    mean = statistics.fmean(values, sizes)
    squares = math.fsum((size / sum(sizes) * (v - mean)) ** 2 for v, size in zip(values, sizes, strict=True))
    return math.sqrt(count / (count - 1) * squares)


def held_out_records(
    runs: Sequence[RunRecord], baseline: dict[str, float], *, num_examples: int, num_available: int
) -> tuple[HeldOutRecord, ...]:
    """A record per role and metric, over the seeds of that role, which see the same held-out batches.

    A role that resumed with another number of processes has none, because its batches have changed.
    """
    records = []
    for role in dict.fromkeys(r.role for r in runs):
        evaluated = [r.held_out for r in runs if r.role == role]
        if not all(len(e) == 2 for e in evaluated) or not _have_equal_sizes(x for e in evaluated for x in e):
            continue
        sizes = evaluated[0][1].sizes
        for metric, figures in _FIGURES.items():
            before, after = (_over_seeds([figures(e[i]) for e in evaluated]) for i in (0, 1))
            if after:
                changes = [b - a for a, b in zip(before, after, strict=True)]
                records.append(
                    HeldOutRecord(
                        role=role,
                        metric=metric,
                        num_examples=num_examples,
                        num_available=num_available,
                        baseline=baseline.get(metric),
                        before=statistics.fmean(before, sizes),
                        after=statistics.fmean(after, sizes),
                        standard_error=batch_error(after, sizes),
                        change_error=batch_error(changes, sizes),
                    )
                )
    return tuple(records)


def gap_error(pairs: Sequence[tuple[RunRecord, RunRecord]], metric: str) -> float | None:
    """Standard error of the mean gap of (run, twin) pairs, from common held-out batches; None without them."""
    if metric not in _FIGURES or not all(run.held_out and twin.held_out for run, twin in pairs):
        return None
    figures = _FIGURES[metric]
    ends = [(run.held_out[-1], twin.held_out[-1]) for run, twin in pairs]
    if not _have_equal_sizes(end for both in ends for end in both):
        return None
    gaps = [tuple(a - b for a, b in zip(figures(run), figures(twin), strict=True)) for run, twin in ends]
    return batch_error(_over_seeds(gaps), ends[0][0].sizes)


def _have_equal_sizes(evaluations: Iterable[EvaluationRecord]) -> bool:
    return len({e.sizes for e in evaluations}) == 1


def _over_seeds(figures: Sequence[Figures]) -> list[float]:
    """For each batch, the mean over seeds."""
    return [statistics.fmean(values) for values in zip(*figures, strict=True)]
