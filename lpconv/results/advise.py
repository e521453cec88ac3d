"""Records of `lpconv advise`."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.documents import Purpose, RunResult


@dataclass(frozen=True, kw_only=True)
class GapEstimate:
    """Mean of `count` paired differences, and its 95 % interval from `low` to `high`.

    In an advice it is the cost of a candidate, in nats of loss or as a relative error of the outputs, and the pairs are
    windows of text or seeds. In a verification it is the drop of a score, and the pairs are the questions of a task,
    or the rise of the loss, and the pairs are windows of text. `deviation` is their standard deviation, and
    `detectable` the smallest true difference whose 95 % interval would exclude 0 in 80 % of cases; `num_needed` pairs
    would make it as small as `wanted`.
    """

    value: float
    low: float
    high: float
    count: int
    deviation: float | None = None
    detectable: float | None = None
    wanted: float | None = None
    num_needed: int | None = None


@dataclass(frozen=True, kw_only=True)
class AdviceRow:
    """One candidate for ``infer`` or ``train``, with its measurements.

    `settings` are those of a manifest job that carries it out. `status` is "measured", "pruned" (ruled out by a cheaper
    measurement), "unmeasured" (time ran out, or the user stopped) or "failed"; `why` gives the reason. `noise` is the
    noise-to-signal ratio of a sample of the weights, `sqnr_db` the lowest SQNR of a tensor, `rounded_inputs` says to
    what readers round inputs, as the gap does, None if they do not; `figures` are further
    metrics for gates. `memory_from` and `time_from` name the origin of memory and step time. `meets`: the gap with its
    interval, and the memory, are within the budget. `calibration_s` is the time that error feedback took, if any;
    `seconds` is the time of the whole measurement, or for an unmeasured row an estimate of it, if there is one.
    """

    purpose: Purpose
    name: str
    settings: dict[str, Any]
    status: str
    why: str = ""
    size_bytes: int | None = None
    noise: float | None = None
    sqnr_db: float | None = None
    rounded_inputs: str | None = None
    gap: GapEstimate | None = None
    figures: dict[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_from: str = ""
    step_time_s: float | None = None
    time_from: str = ""
    meets: bool | None = None
    calibration_s: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """Cost of converting a part of a candidate: a tensor, or all that match the pattern `tensor`.

    `divergence` is the mean KL divergence of the model's predictions on the text in nats, or for models that predict no
    tokens the relative error of the output. `format` is the stored format, `bits` per element,
    and `sqnr_db` the lowest of a tensor.
    """

    tensor: str
    format: str
    bits: float
    sqnr_db: float | None
    divergence: float


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Recommended row for a purpose, the reason in words, and the command that carries it out.

    Without a row nothing was certain to be within the budget. `nearest` is the most promising candidate, the row itself
    if there is one; None if all are certain not to be within the budget.
    """

    purpose: Purpose
    row: str | None
    words: str
    command: str | None = None
    nearest: str | None = None


@dataclass(frozen=True, kw_only=True)
class AdviceResult(RunResult):
    """Result of `lpconv advise`: rows (best first), one recommendation per purpose, and what could not be measured.

    `metric` is the unit of inference gaps: "loss" or "output". `parts` belong to the row `parts_of`, and
    `parts_whole` is the divergence of all together, if all were measured. `findings` are sentences from the probe.
    `source_bytes` is the size of the model's weight files, `steps_tried` the number of steps of the training runs (0 if
    none ran). `interrupted`: measurements are missing because the user stopped the run.
    """

    kind: str = "advice"
    name: str
    facts: dict[str, str]
    metric: str
    source_bytes: int
    steps_tried: int = 0
    rows: tuple[AdviceRow, ...]
    recommendations: tuple[Recommendation, ...] = ()
    parts: tuple[LayerPart, ...] = ()
    parts_of: str | None = None
    parts_whole: float | None = None
    findings: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()
    seconds: float = 0.0
    interrupted: bool = False
