"""What `lpconv advise` found."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.documents import Purpose, RunResult


@dataclass(frozen=True, kw_only=True)
class GapEstimate:
    """Cost of a candidate: nats of loss for training, a relative error of the outputs for inference.

    `low` and `high` are its 95 % interval, from `count` windows of text or seeds.
    """

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class AdviceRow:
    """One measured candidate, for ``infer`` or ``train``.

    `settings` are those of a job in a manifest that carries it out. `status` is "measured", "pruned" (by a cheaper
    measurement), "unmeasured" (time, or somebody, ended the measurements) or "failed"; `why` says more. `noise` is
    noise over signal of a sample of the weights, `sqnr_db` the smallest signal-to-noise ratio of a tensor; `figures`
    are further measured ones that gates ask for. `memory_from` and `time_from` say where memory and step time come
    from. `meets` says whether the gap, its interval included, and the memory stay within the budget.
    """

    purpose: Purpose
    name: str
    settings: dict[str, Any]
    status: str
    why: str = ""
    size_bytes: int | None = None
    noise: float | None = None
    sqnr_db: float | None = None
    gap: GapEstimate | None = None
    figures: dict[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_from: str = ""
    step_time_s: float | None = None
    time_from: str = ""
    meets: bool | None = None


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """Cost of converting one tensor of a candidate alone.

    `divergence` is the mean Kullback-Leibler divergence of the model's predictions on the text in nats, of models that
    predict no tokens the relative error of the output. `format` is what it is stored in, `bits` per element.
    """

    tensor: str
    format: str
    bits: float
    sqnr_db: float | None
    divergence: float


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Recommended row for a purpose (None: none), the reason in words, and the command that carries it out."""

    purpose: Purpose
    row: str | None
    words: str
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class AdviceResult(RunResult):
    """Result of `lpconv advise`: rows, best first, one recommendation for each purpose, and what could not be measured.

    `metric` says what the gaps of inference are: "loss" or "output". `parts` belong to the row `parts_of`. `findings`
    are the probe's, in words. `source_bytes` are those of the model's weight files, `steps_tried` the steps that the
    runs of training had (0: none ran). `interrupted` says that measurements are missing because somebody stopped it.
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
    findings: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()
    seconds: float = 0.0
    interrupted: bool = False
