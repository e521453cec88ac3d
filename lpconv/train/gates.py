"""The gates of a fine-tuning, before it and after it."""

from lpconv.errors import UsageError, VerificationError
from lpconv.gates import FINETUNE_GATES, Gate
from lpconv.report.numbers import number_text, plural
from lpconv.results import FinetuneResult, to_json
from lpconv.train.options import FinetuneOptions

__all__ = ["gate_problem", "parse_gates"]


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
