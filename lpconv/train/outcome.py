"""What becomes of a fine-tuning: the gap between run and twin, whether it exceeds noise, and the gates on it."""

import statistics
from collections.abc import Sequence

from lpconv.errors import UsageError, VerificationError
from lpconv.gates import FINETUNE_GATES, Gate
from lpconv.report.numbers import number_text, plural
from lpconv.results import FinetuneResult, GapRecord, RunRecord, to_json
from lpconv.student import t_quantile
from lpconv.train.held_out import gap_error
from lpconv.train.options import FinetuneOptions

__all__ = ["gaps", "gate_problem", "parse_gates"]


def parse_gates(options: FinetuneOptions) -> tuple[Gate, ...]:
    """The gates of a run; UsageError with what is wrong, or with what the run would have to measure."""
    gates = tuple(map(FINETUNE_GATES.parse, options.gates))
    for gate in gates:
        if "gap" in gate.metric and options.twin == "none":
            raise UsageError(f"gate `{gate.expression}` needs a twin", hint="leave --twin none out")
        if gate.metric == "loss_gap_low" and options.seeds == 1:
            raise UsageError(f"gate `{gate.expression}` needs an interval", hint="--seeds 3")
    return gates


def gate_problem(result: FinetuneResult) -> VerificationError | None:
    """The error that a command should end with where gates failed. The trained model and the report stay."""
    failed = [g for g in result.gates if not g.passed]
    if not failed:
        return None
    met = "; ".join(f"{g.expression} met {'nothing' if g.value is None else number_text(g.value)}" for g in failed)
    return VerificationError(
        f"{plural(len(failed), 'gate')} failed: {met}",
        hint=f"the model and its report are in `{result.output}`",
        details={"gates": to_json(result.gates)},
    )


def gaps(runs: Sequence[RunRecord]) -> tuple[GapRecord, ...]:
    """One record per held-out metric, from the last evaluation of every run that has a twin of its seed."""
    twins = {r.seed: r for r in runs if r.role == "twin"}
    pairs = [(r, twins[r.seed]) for r in runs if r.role == "run" and r.seed in twins]
    return tuple(_gap(s.name, pairs) for s in (pairs[0][0].evaluations if pairs else ()) if s.values)


def _gap(metric: str, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> GapRecord:
    """Paired: run and twin of a seed saw the same batches, so their difference varies less than either."""
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
    )


def _last(run: RunRecord, metric: str) -> float:
    return next(s.values[-1] for s in run.evaluations if s.name == metric)
