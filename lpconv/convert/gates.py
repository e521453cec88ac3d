"""Gates: conditions that a result must meet, such as ``sqnr>=25``. A gate that fails keeps the output unpublished."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.results import GateRecord, LogitsCheck, VerifyResult, WeightsCheck

__all__ = ["METRICS", "Gate", "check_gates", "needs_logits", "parse_gate"]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip

WeightsMetric = Callable[[WeightsCheck], float]
LogitsMetric = Callable[[LogitsCheck], float | None]

# name → (figure of the weights, figure of the logits); exactly one of the two is there.
METRICS: dict[str, tuple[WeightsMetric | None, LogitsMetric | None]] = {
    "sqnr": (lambda w: w.min_sqnr_db, None),
    "max_rel_error": (lambda w: w.max_rel_error, None),
    "logits_max_abs_diff": (None, lambda g: g.max_abs_diff),
    "logits_rel_error": (None, lambda g: g.rel_error),
    "top1": (None, lambda g: g.top1_agreement),
    "kl": (None, lambda g: g.mean_kl),
}


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`metric` compared with `bound`."""

    expression: str
    metric: str
    operator: str
    bound: float

    def check(self, value: float | None) -> GateRecord:
        """The gate with the value it met; one that was not measured fails."""
        passed = value is not None and _OPERATORS[self.operator](value, self.bound)
        return GateRecord(expression=self.expression, value=value, passed=passed)


def parse_gate(text: str, metrics: Mapping[str, object] = METRICS, example: str = "sqnr>=25") -> Gate:
    """``METRIC>=NUMBER`` (or <=, >, <, ==) as a gate on one of `metrics`."""
    match = re.fullmatch(r"\s*(\w+)\s*(>=|<=|==|>|<)\s*([-+.\w]+)\s*", text)
    if not match:
        raise UsageError(f"gate `{text}` is not METRIC>=NUMBER", hint=f"for example --gate '{example}'")
    find("metric", match[1], metrics)
    try:
        bound = float(match[3])
    except ValueError as e:
        raise UsageError(f"gate `{text}`: `{match[3]}` is not a number", hint=f"for example --gate '{example}'") from e
    return Gate(expression=text.strip(), metric=match[1], operator=match[2], bound=bound)


def needs_logits(gates: Sequence[Gate]) -> bool:
    """Whether any gate asks for a figure that only running the models gives."""
    return any(METRICS[g.metric][1] is not None for g in gates)


def check_gates(gates: Sequence[Gate], result: VerifyResult) -> tuple[GateRecord, ...]:
    """Each gate with the value it met. A figure that was not measured fails its gate."""
    return tuple(g.check(_value(g, result)) for g in gates)


def _value(gate: Gate, result: VerifyResult) -> float | None:
    of_weights, of_logits = METRICS[gate.metric]
    if of_weights is not None:
        return of_weights(result.weights) if result.weights else None
    assert of_logits is not None
    return of_logits(result.logits) if result.logits else None
