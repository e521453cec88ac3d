"""Records of training: `lpconv finetune` and `lpconv probe`."""

import math
import statistics
from dataclasses import dataclass, field

from lpconv.results.documents import Result, RunResult, RunRole, TensorRole
from lpconv.results.verify import GateRecord


@dataclass(frozen=True, kw_only=True)
class UpdateQuality:
    """Share of a step's intended update that reached the weights (effective descent quality of Collage).

    `edq` is relative to the norm of the intended update, for the full stored weights; `edq_weights` for the 16-bit
    weights alone. `lost` is the share of intended changes that changed nothing.
    """

    step: int
    edq: float
    edq_weights: float
    lost: float


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes at the memory peak of a training step, by kind; of a run of two steps, only `measured_bytes`.

    `measured_bytes` is the peak according to another measurement, named in `instrument`.
    """

    parts: dict[str, int]
    measured_bytes: int
    instrument: str


@dataclass(frozen=True, kw_only=True)
class LayerChange:
    """Change of the loss due to one layer; negative is an improvement. `rounding` is the part caused by rounding.

    `helped` is the share of its moved elements that lowered the loss, None if none moved.
    """

    layer: str
    change: float
    rounding: float
    helped: float | None


@dataclass(frozen=True, kw_only=True)
class LossAllocation:
    """Loss change allocation on the first `num_batches` held-out batches, by layer (`lpconv.probe.lca`).

    It covers the steps `first_step` to `last_step`. `change` is the allotted change and `rounding` the part caused by
    rounding; `rounding_share` is the share of the intended change that rounding undid, None if nothing was intended.
    `closure_error` is |change - true change| / |true change|.
    """

    first_step: int
    last_step: int
    num_batches: int
    loss_before: float
    loss_after: float
    change: float
    rounding: float
    rounding_share: float | None
    closure_error: float
    layers: tuple[LayerChange, ...]


@dataclass(frozen=True, kw_only=True)
class NonfiniteRecord:
    """The first Inf or NaN of a run: step, layer, forward or backward pass, and the reaction to it."""

    step: int
    layer: str
    direction: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of a metric over the steps of a run; step 0 is the model before training."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(f"{len(self.values)} values of `{self.name}` for {len(self.steps)} steps")


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation, batch by batch: number of held-out targets, mean loss and, for classification, accuracy."""

    step: int
    sizes: tuple[int, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecipeMemory:
    """Bytes that one training step of a recipe needs on each rank that shares the model, by kind."""

    recipe: str
    num_ranks: int
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(Result):
    """Estimate of the memory that training a model needs, from its config alone.

    `memory` has every recipe on 1, 2, 4 … ranks that share the model; `gpus` has, for each recipe and kind of GPU, the
    smallest sufficient number of GPUs, or None. `batch_size` is per forward pass over all ranks; each rank has at least
    one sequence of `seq_len` tokens. A step has `grad_accum` passes. `recipe` is the requested one.
    """

    kind: str = "memory_plan"
    name: str
    recipe: str
    num_parameters: int
    batch_size: int
    grad_accum: int = 1
    gradient_checkpointing: bool = False
    seq_len: int
    memory: tuple[RecipeMemory, ...]
    gpus: dict[str, dict[str, int | None]]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One training run. `evaluations` has a series per held-out metric, `held_out` its first and last evaluation.

    `losses` and `evaluations` are not empty. Metrics are in the run's own arithmetic; final metrics of the trained
    weights in fp32 have the suffix ``_fp32``, and those of the published model, opened in fp32, ``_published`` (missing
    in older records).

    `role` is ``run`` or ``twin``. `step_time_s` is the median over steps without measuring. `seconds` is the wall time
    by activity since the last resumption. `notes` tell the user how the model was opened. `update_kept` is the share of
    an adapter's update that trained codes have: 1 - √(KL after / KL before), where KL is to the model with the adapter,
    on held-out text, and the root is taken because KL grows with the square of a small change. `kept_by_layer` is the
    share of its change of the states after layers.
    """

    role: RunRole
    seed: int
    losses: Series
    evaluations: tuple[Series, ...]
    loss_scales: Series
    num_skipped: int = 0
    step_time_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    updates: tuple[UpdateQuality, ...] = ()
    memory: PeakMemory | None = None
    first_nonfinite: NonfiniteRecord | None = None
    loss_allocation: LossAllocation | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    held_out: tuple[EvaluationRecord, ...] = ()
    notes: tuple[str, ...] = ()
    update_kept: float | None = None
    kept_by_layer: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for series in (self.losses, *self.evaluations):
            if not series.steps:
                raise ValueError(f"`{series.name}` of a run has no values")


@dataclass(frozen=True, kw_only=True)
class HeldOutRecord:
    """A held-out metric before the first and after the last step, as means over the seeds of one role.

    It uses `num_examples` of the `num_available` held-out examples. `baseline` is the metric of a guess from class or
    token frequencies in the training data (`lpconv.train.held_out`). `standard_error` is for `after`, `change_error`
    for `after` - `before`, both between batches; None with one batch.
    """

    role: RunRole
    metric: str
    num_examples: int
    num_available: int
    baseline: float | None
    before: float
    after: float
    standard_error: float | None
    change_error: float | None

    @property
    def improved(self) -> bool:
        """Whether training improved the metric by more than two standard errors of the change."""
        return self._better_than(self.before, self.change_error)

    @property
    def beats_baseline(self) -> bool:
        """Whether the metric is better than the baseline by more than two standard errors."""
        return self.baseline is None or self._better_than(self.baseline, self.standard_error)

    def _better_than(self, other: float, error: float | None) -> bool:
        gain = other - self.after if self.metric == "eval_loss" else self.after - other
        return gain > 2 * (error or 0.0)


@dataclass(frozen=True, kw_only=True)
class GapRecord:
    """Difference of a held-out metric between the run and its twin after the last step, as means over seeds.

    `gap` is run minus twin. `half_width` is half of its 95 % interval from paired seeds (Student's t), `noise` the
    standard deviation of the twin over seeds, `detectable` the smallest true gap that these seeds show with 80 % power;
    all None with one seed. `standard_error` is for the gap between held-out batches, which more seeds do not reduce;
    None with one batch.
    """

    metric: str
    run: float
    twin: float
    gap: float
    half_width: float | None = None
    noise: float | None = None
    standard_error: float | None = None
    detectable: float | None = None

    @property
    def value(self) -> float:
        """The gap, under the name that it has in a `GapEstimate`."""
        return self.gap

    @property
    def exceeds_noise(self) -> bool | None:
        """Whether the interval excludes zero; None with a single seed."""
        return None if self.half_width is None else abs(self.gap) > self.half_width


@dataclass(frozen=True, kw_only=True)
class FinetuneResult(RunResult):
    """Result of a fine-tuning: the low-precision run and its twin over all seeds, and their comparison.

    `facts` are labelled settings. `recipe` names the arithmetic and `twin` that of the twin. `spent` divides the
    command's `seconds` by activity; the rest is start-up and small tasks. `held_out` has a record per role and metric;
    it is empty in documents of older versions. `card` are the facts of the source's model card that the output repeats:
    base model and licence.

    `source` is set for a recovery: every loss is then the KL divergence from this model's predictions, in nats per
    token, and accuracy is the share of tokens with its first choice.
    """

    kind: str = "finetune"
    name: str
    recipe: str
    twin: str | None
    source: str | None = None
    task: str
    facts: dict[str, str]
    runs: tuple[RunRecord, ...]
    gaps: tuple[GapRecord, ...]
    spent: dict[str, float] = field(default_factory=dict)
    saved_as: str
    held_out: tuple[HeldOutRecord, ...] = ()
    gates: tuple[GateRecord, ...] = ()
    card: dict[str, str] = field(default_factory=dict)

    @property
    def update_kept(self) -> float | None:
        """Mean share of an adapter's update that the codes have; None if it was not measured."""
        kept = [r.update_kept for r in self.runs if r.update_kept is not None]
        return statistics.fmean(kept) if kept else None

    def learned(self, role: str) -> bool | None:
        """Whether held-out metrics show that the runs of a role learned anything; None if they cannot tell.

        A metric must have improved, and accuracy must exceed that of always naming the largest class.
        """
        records = [r for r in self.held_out if r.role == role]
        if not records:
            return None
        return any(r.improved for r in records) and all(
            r.beats_baseline for r in records if r.metric == "eval_accuracy"
        )


@dataclass(frozen=True, kw_only=True)
class FormatRates:
    """Effects of one format on a tensor at one loss scale, as shares of its finite, nonzero elements.

    `sqnr_db` is an estimate: inf if the format represents every value, NaN without a signal. `fits`: almost nothing is
    lost (`lpconv.probe.advice.what_if`). `fits_own_scale`: the same with the tensor's own power-of-two scale instead of
    the loss scale.
    """

    format: str
    log2_loss_scale: int
    underflow: float
    subnormal: float
    overflow: float
    sqnr_db: float
    fits: bool
    fits_own_scale: bool

    @property
    def lost(self) -> float:
        """Share of elements that underflow to zero or overflow."""
        return self.underflow + self.overflow

    @property
    def worst_first(self) -> tuple[float, float]:
        """Sort key: most elements lost, then lowest signal-to-noise ratio."""
        return -self.lost, math.inf if math.isnan(self.sqnr_db) else self.sqnr_db


@dataclass(frozen=True, kw_only=True)
class ProbedRecord:
    """Exponents of one tensor role of one layer, and the effect of each format; `words` is its display name.

    `exponents` counts the elements by floor(log2|x|), lowest first. `plain` has the rates at loss scale 1, `scaled` at
    the scale recommended for each format, which differs for gradients only; both in the order of the report's formats.
    """

    layer: str
    role: TensorRole
    words: str
    is_gradient: bool
    num_elements: int
    num_zero: int
    num_nonfinite: int
    exponents: tuple[tuple[int, int], ...]
    plain: tuple[FormatRates, ...]
    scaled: tuple[FormatRates, ...]


@dataclass(frozen=True, kw_only=True)
class LossScaleRecord:
    """Recommended power-of-two loss scale for one format, with the worst gradient underflow at 1 and at that scale.

    `max_log2_scale` is the largest that leaves headroom above the largest recorded gradient.
    """

    format: str
    log2_scale: int
    max_log2_scale: int
    worst_underflow_before: float
    worst_underflow_after: float


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Norms of a gradient, and of the noise and the bias that rounding adds; `name` is a layer or a recipe.

    The noise comes from stochastic rounding; see `lpconv.probe.gradient_noise`.
    """

    name: str
    gradient: float
    noise: float
    bias: float

    @property
    def ratio(self) -> float:
        """Gradient over noise; Inf without noise."""
        return self.gradient / self.noise if self.noise else math.inf

    @property
    def is_drowned(self) -> bool:
        """Whether the gradient is below √3 of its noise, where rounded training stops helping (arXiv 2505.19115)."""
        return self.ratio < math.sqrt(3)


@dataclass(frozen=True, kw_only=True)
class RecipeNoise(GradientNoise):
    """Gradients of the weights whose products a recipe rounds, together and by layer."""

    layers: tuple[GradientNoise, ...]


@dataclass(frozen=True, kw_only=True)
class ProbeReport(Result):
    """Effects of several formats on the tensors of a probe. `findings` describe the worst tensors in each format.

    `at_risk` lists operands that fp8 represents badly even with scales per tensor, and a remedy last. `classes` are the
    display names of roles, in the order of a training step. `facts` are labelled settings. `overhead` is the time of
    recording divided by the other time.
    """

    kind: str = "probe-report"
    name: str
    facts: dict[str, str]
    formats: tuple[str, ...]
    classes: tuple[str, ...]
    steps_seen: int
    steps_recorded: int
    losses: tuple[float, ...]
    overhead: float
    tensors: tuple[ProbedRecord, ...]
    loss_scales: tuple[LossScaleRecord, ...]
    findings: dict[str, tuple[str, ...]]
    at_risk: tuple[str, ...] = ()
    noise: tuple[RecipeNoise, ...] = ()
    warnings: tuple[str, ...] = ()
