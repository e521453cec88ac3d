"""Gates of a fine-tuning: conditions on what it ended at, such as ``loss_gap<=0.05``."""

import statistics
from collections.abc import Callable, Sequence

from lpconv.convert.gates import Gate, parse_gate
from lpconv.errors import UsageError, VerificationError
from lpconv.report.numbers import number_text, plural
from lpconv.results import FinetuneResult, GapRecord, GateRecord, to_json
from lpconv.train.options import FinetuneOptions

__all__ = ["METRICS", "check_gates", "gate_problem", "parse_gates"]


def _end(name: str) -> Callable[[FinetuneResult], float | None]:
    """A held-out figure of the run after its last step, mean over seeds."""

    def value(result: FinetuneResult) -> float | None:
        series = [s for r in result.runs if r.role == "run" for s in r.evaluations if s.name == name]
        return statistics.fmean(s.values[-1] for s in series) if series else None

    return value


def _gap(name: str, figure: Callable[[GapRecord], float | None]) -> Callable[[FinetuneResult], float | None]:
    """A figure of the gap between run and twin."""

    def value(result: FinetuneResult) -> float | None:
        found = next((g for g in result.gaps if g.metric == name), None)
        return None if found is None else figure(found)

    return value


METRICS: dict[str, Callable[[FinetuneResult], float | None]] = {
    "loss": _end("eval_loss"),
    "loss_gap": _gap("eval_loss", lambda g: g.gap),
    # What the gap is at least, by its 95 % interval: above 0 where it is beyond noise.
    "loss_gap_low": _gap("eval_loss", lambda g: None if g.half_width is None else g.gap - g.half_width),
    "accuracy": _end("eval_accuracy"),
    "accuracy_gap": _gap("eval_accuracy", lambda g: g.gap),
    "skipped": lambda result: sum(r.num_skipped for r in result.runs if r.role == "run"),
}


def parse_gates(options: FinetuneOptions) -> tuple[Gate, ...]:
    """The gates of a run; UsageError with what is wrong, or with what the run would have to measure."""
    gates = tuple(parse_gate(text, METRICS, "loss_gap<=0.05") for text in options.gates)
    for gate in gates:
        if "gap" in gate.metric and options.twin == "none":
            raise UsageError(f"gate `{gate.expression}` needs a twin", hint="leave --twin none out")
        if gate.metric == "loss_gap_low" and options.seeds == 1:
            raise UsageError(f"gate `{gate.expression}` needs an interval", hint="--seeds 3")
    return gates


def check_gates(gates: Sequence[Gate], result: FinetuneResult) -> tuple[GateRecord, ...]:
    """Each gate with the value it met; one that was not measured, such as accuracy of a language model, fails."""
    return tuple(gate.check(METRICS[gate.metric](result)) for gate in gates)


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
