"""Gates: conditions that a result must meet, such as ``sqnr>=25``, and the metrics that they can use."""

import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.results import BenchRow, FinetuneResult, GapEstimate, GapRecord, GateRecord, VerifyResult

R = TypeVar("R")

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip

# A mean difference knows the smallest one that its pairs could have shown.
Figure = float | GapEstimate | GapRecord | None


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A condition that compares `metric` with `bound`."""

    expression: str
    metric: str
    operator: str
    bound: float

    def check(self, figure: Figure) -> GateRecord:
        """Check a figure against the bound. None (not measured) fails.

        So does a mean difference within a bound that is smaller than the differences that its pairs could have shown.
        """
        value, shown = (
            (figure, None) if figure is None or isinstance(figure, (int, float)) else (figure.value, figure.detectable)
        )
        passed = value is not None and _OPERATORS[self.operator](value, self.bound)
        allowed = self.bound if self.operator in ("<", "<=") else -self.bound
        could_fail = shown is None or allowed <= 0 or shown <= allowed
        return GateRecord(expression=self.expression, value=value, passed=passed and could_fail, detectable=shown)


@dataclass(frozen=True, kw_only=True)
class GateTable(Generic[R]):
    """The metrics of one kind of result that gates can use. A metric is None if it was not measured.

    `families` are metrics with a name of the user's after a colon, which they get: "task:arc_easy:acc_drop".
    """

    metrics: Mapping[str, Callable[[R], Figure]]
    example: str
    families: Mapping[str, Callable[[R, str], Figure]] = field(default_factory=dict)

    def parse(self, text: str) -> Gate:
        """Parse ``METRIC>=NUMBER`` (or <=, >, <, ==). Raises UsageError that says what is wrong."""
        hint = f"for example --gate '{self.example}'"
        match = re.fullmatch(r"\s*(\w+(?::[^\s<>=]+)?)\s*(>=|<=|==|>|<)\s*([-+.\w]+)\s*", text)
        if not match:
            raise UsageError(f"gate `{text}` is not METRIC>=NUMBER", hint=hint)
        family, _, name = match[1].partition(":")
        if not (name and family in self.families):
            find("metric", match[1], self.metrics)
        try:
            bound = float(match[3])
        except ValueError:
            bound = math.nan
        if math.isnan(bound):
            raise UsageError(f"gate `{text}`: `{match[3]}` is not a number", hint=hint)
        return Gate(expression=text.strip(), metric=match[1], operator=match[2], bound=bound)

    def check(self, gates: Sequence[Gate], result: R) -> tuple[GateRecord, ...]:
        """Check each gate against the result. A metric that was not measured fails its gate."""
        return tuple(g.check(self._value(g.metric, result)) for g in gates)

    def values(self, result: R) -> dict[str, float]:
        """The metrics that were measured, by name."""
        figures = {name: figure(result) for name, figure in self.metrics.items()}
        return {n: f if isinstance(f, (int, float)) else f.value for n, f in figures.items() if f is not None}

    def _value(self, metric: str, result: R) -> Figure:
        family, _, name = metric.partition(":")
        return self.families[family](result, name) if name else self.metrics[metric](result)


_LOGITS_METRICS: dict[str, Callable[[VerifyResult], Figure]] = {
    "logits_max_abs_diff": lambda v: v.logits.max_abs_diff if v.logits else None,
    "logits_rel_error": lambda v: v.logits.rel_error if v.logits else None,
    "top1": lambda v: v.logits.top1_agreement if v.logits else None,
    "kl": lambda v: v.logits.mean_kl if v.logits else None,
}
_TEXT_METRICS: dict[str, Callable[[VerifyResult], Figure]] = {
    "reverse_kl": lambda v: v.logits.reverse_kl if v.logits else None,
    "perplexity": lambda v: v.logits.perplexity if v.logits else None,
    "loss_gap": lambda v: v.logits.loss_gap if v.logits else None,
}
CONVERT_GATES = GateTable[VerifyResult](
    metrics={
        "sqnr": lambda v: v.weights.min_sqnr_db if v.weights else None,
        "max_rel_error": lambda v: v.weights.max_rel_error if v.weights else None,
        **_LOGITS_METRICS,
    },
    example="sqnr>=25",
)


def _task_metric(result: VerifyResult, name: str) -> Figure:
    """The drop of a score, such as "arc_easy:acc_drop", or the upper end of its interval, "arc_easy:acc_drop_high"."""
    for check in result.tasks:
        ends: dict[str, Figure] = {"_drop": check.drop, "_drop_high": check.drop.high} if check.drop else {}
        for end, value in ends.items():
            if name == f"{check.task}:{check.metric}{end}":
                return value
    return None


def _nearest(result: VerifyResult) -> float | None:
    """The smallest share of codes of a weight that are the nearest to the source."""
    return min((1 - t.rounding.turned for t in result.tensors if t.rounding), default=None)


VERIFY_GATES = GateTable[VerifyResult](
    metrics={**CONVERT_GATES.metrics, **_TEXT_METRICS, "nearest": _nearest},
    example=CONVERT_GATES.example,
    families={"task": _task_metric},
)


def with_gates(result: VerifyResult, gates: Sequence[Gate]) -> VerifyResult:
    """The result of a verification with its gates; it passes if there are no problems and no failed gates."""
    met = VERIFY_GATES.check(gates, result)
    return replace(result, gates=met, passed=not result.problems and all(g.passed for g in met))


def needs_logits(gates: Sequence[Gate]) -> bool:
    """Whether any gate of a conversion needs the logits, and so a run of both models."""
    return any(g.metric in _LOGITS_METRICS for g in gates)


def check_measured(gates: Sequence[Gate], *, has_outputs: bool) -> None:
    """Raise UsageError if a gate of a verification without a text needs one, or outputs that are not compared."""
    for g in gates:
        if g.metric in _TEXT_METRICS or (g.metric in _LOGITS_METRICS and not has_outputs):
            raise UsageError(f"gate `{g.expression}` needs a text that both models read", hint="add --data FILE")


def is_of_task(gate: str) -> bool:
    """Whether a gate needs the answers to a task."""
    return VERIFY_GATES.parse(gate).metric.startswith("task:")


def _final(metric: str, result: FinetuneResult) -> float | None:
    """A held-out metric after the last step, averaged over the seeds of the run."""
    series = [s for r in result.runs if r.role == "run" for s in r.evaluations if s.name == metric]
    return statistics.fmean(s.values[-1] for s in series) if series else None


def _gap(metric: str, result: FinetuneResult) -> GapRecord | None:
    return next((g for g in result.gaps if g.metric == metric), None)


def _loss_gap_low(result: FinetuneResult) -> float | None:
    """Lower end of the gap's 95 % interval: above 0 if the gap exceeds the noise."""
    gap = _gap("eval_loss_published", result)
    return None if gap is None or gap.half_width is None else gap.gap - gap.half_width


FINETUNE_GATES = GateTable[FinetuneResult](
    metrics={
        # Metrics of the published model, because the gate decides about that model; `own` is the arithmetic of the run.
        "loss": partial(_final, "eval_loss_published"),
        "loss_gap": partial(_gap, "eval_loss_published"),
        "loss_gap_low": _loss_gap_low,
        "loss_gap_fp32": partial(_gap, "eval_loss_fp32"),
        "loss_gap_own": partial(_gap, "eval_loss"),
        "accuracy": partial(_final, "eval_accuracy_published"),
        "accuracy_gap": partial(_gap, "eval_accuracy_published"),
        "accuracy_gap_own": partial(_gap, "eval_accuracy"),
        "accuracy_gap_fp32": partial(_gap, "eval_accuracy_fp32"),
        "update_kept": lambda result: result.update_kept,
        "skipped": lambda result: sum(r.num_skipped for r in result.runs if r.role == "run"),
    },
    example="loss_gap<=0.05",
)

BENCH_GATES = GateTable[BenchRow](
    metrics={
        "speedup": lambda r: r.ratio.value if r.ratio else None,
        "speedup_low": lambda r: r.ratio.low if r.ratio else None,
        "tokens_per_s": lambda r: r.tokens_per_s,
        "peak_memory": lambda r: r.peak_memory,
        "saved_memory": lambda r: r.memory.saved_bytes if r.memory else None,
        "output_error": lambda r: r.numerics.output_error if r.numerics else None,
        "gradient_error": lambda r: r.numerics.gradient_error if r.numerics else None,
    },
    example="speedup>=1.2",
)

GATES: Mapping[str, GateTable[Any]] = {
    "convert": CONVERT_GATES,
    "verify": VERIFY_GATES,
    "finetune": FINETUNE_GATES,
    "bench": BENCH_GATES,
}


def check_rows(gates: Sequence[Gate], rows: Sequence[BenchRow]) -> tuple[GateRecord, ...]:
    """Check every gate on every row, except baselines and skipped rows. A row that failed fails its gates."""
    judged = [r for r in rows if not r.is_baseline and r.status != "skipped"]
    checked = ((r, record) for g in gates for r in judged for record in BENCH_GATES.check([g], r))
    return tuple(replace(record, expression=f"{record.expression} ({r.name}, {r.place})") for r, record in checked)
