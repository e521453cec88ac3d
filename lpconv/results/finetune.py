"""What `lpconv finetune` found."""

from dataclasses import dataclass, field

from lpconv.results.documents import Result, Role, RunResult, TensorRole
from lpconv.results.verify import GateRecord


@dataclass(frozen=True, kw_only=True)
class TrackedRecord:
    """Effect of a format on one tensor role of one layer at one step, as shares of its nonzero elements.

    `sqnr_db` is an estimate; `flushed_energy` and `clipped_energy` are shares of the tensor's energy that were lost
    with elements that became zero or saturated. All three are None in older records, `sqnr_db` also without an error.
    """

    step: int
    layer: str
    role: TensorRole
    format: str
    underflow: float
    overflow: float
    sqnr_db: float | None = None
    flushed_energy: float | None = None
    clipped_energy: float | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateQuality:
    """Share of a step's intended update that reached the weights (Collage: effective descent quality;
    `lpconv.optim.diagnostics`).

    `edq` is over the intended update's norm, of everything kept; `edq_weights` of the 16-bit weights alone. `lost` is
    the share of meant changes that left everything as it was.
    """

    step: int
    edq: float
    edq_weights: float
    lost: float


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes at the memory peak of a training step, by kind.

    `measured_bytes` is the peak as another instrument saw it, named by `instrument`.
    """

    parts: dict[str, int]
    measured_bytes: int
    instrument: str


@dataclass(frozen=True, kw_only=True)
class LayerChange:
    """Change of the loss due to one layer; negative is an improvement. `rounding` is the part of it caused by rounding.

    `helped` is the share of its moved elements that lowered the loss, None where none moved.
    """

    layer: str
    change: float
    rounding: float
    helped: float | None


@dataclass(frozen=True, kw_only=True)
class LossAllocation:
    """Loss change allocation: the change of the loss on the first `num_batches` held-out batches, split by layer
    (`lpconv.probe.lca`).

    It covers the steps from `first_step` to `last_step`. `change` is what was allotted and `rounding` the part that
    rounding caused; `rounding_share` is what rounding took of the intended change, None where nothing was intended.
    `closure_error` is the distance of `change` from the true change, over the true change.
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
    """The first Inf or NaN of a run: step, layer, forward or backward pass, and what was done about it."""

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
    """One evaluation, batch by batch: number of held-out examples, mean loss and, for classification, accuracy."""

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
        """Of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(Result):
    """Estimate of the memory that training a model needs, from its config alone.

    `memory` has every recipe on 1, 2, 4 … ranks that share the model; `gpus` for each recipe the smallest number of
    devices, by their titles, of which each has room; None where no number has. `batch_size` is that of a step over all
    ranks; each has at least one sequence of `seq_len` tokens. `recipe` is the one that was asked for.
    """

    kind: str = "memory_plan"
    name: str
    recipe: str
    num_parameters: int
    batch_size: int
    seq_len: int
    memory: tuple[RecipeMemory, ...]
    gpus: dict[str, dict[str, int | None]]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One training run; `evaluations` has one series per held-out metric, `held_out` the first and the last value of
    each.

    `losses` and `evaluations` are not empty.

    Metrics are those of the run's own arithmetic; the last figures of its trained weights in fp32 follow under the same
    names with ``_fp32``, and those of the published model in fp32, as its files open, with ``_published``. Older
    records lack the latter.

    `role` is ``run`` or ``twin``. `step_time_s` is the median over steps that recorded nothing, `overhead` the time of
    recording as a share of the rest. `seconds` says what wall time went into, since the last resumption.
    """

    role: Role
    seed: int
    losses: Series
    evaluations: tuple[Series, ...]
    loss_scales: Series
    num_skipped: int = 0
    step_time_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    overhead: float = 0.0
    tracked: tuple[TrackedRecord, ...] = ()
    updates: tuple[UpdateQuality, ...] = ()
    memory: PeakMemory | None = None
    first_nonfinite: NonfiniteRecord | None = None
    loss_allocation: LossAllocation | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    held_out: tuple[EvaluationRecord, ...] = ()

    def __post_init__(self) -> None:
        for series in (self.losses, *self.evaluations):
            if not series.steps:
                raise ValueError(f"`{series.name}` of a run has no values")


@dataclass(frozen=True, kw_only=True)
class HeldOutRecord:
    """A held-out metric before the first step and after the last, as means over the seeds of one role.

    It rests on `num_examples` of the `num_available` held out. `baseline` is what a guess gets that knows the training
    part's share of each class or token only (`lpconv.train.baseline`). `standard_error` is that of `after`,
    `change_error` of `after` less `before`, both from batch to batch; None with one batch.
    """

    role: Role
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
        """Whether the metric is better than the guess's by more than two standard errors."""
        return self.baseline is None or self._better_than(self.baseline, self.standard_error)

    def _better_than(self, other: float, error: float | None) -> bool:
        gain = other - self.after if self.metric == "eval_loss" else self.after - other
        return gain > 2 * (error or 0.0)


@dataclass(frozen=True, kw_only=True)
class GapRecord:
    """Difference of a held-out metric between the run and its twin after the last step, as means over seeds.

    `gap` is run less twin. `half_width` is that of its 95 % interval from paired seeds (Student's t), `noise` the
    standard deviation of the twin from seed to seed; both None with one seed. `standard_error` is that of the gap from
    one held-out batch to the next, which more seeds do not lessen; None with one batch.
    """

    metric: str
    run: float
    twin: float
    gap: float
    half_width: float | None = None
    noise: float | None = None
    standard_error: float | None = None

    @property
    def exceeds_noise(self) -> bool | None:
        """Whether the interval leaves zero out; None where one seed cannot say."""
        return None if self.half_width is None else abs(self.gap) > self.half_width


@dataclass(frozen=True, kw_only=True)
class FinetuneResult(RunResult):
    """Result of a fine-tuning: the low-precision run and its twin over all seeds, and the comparison of the two.

    `facts` says how it was run, label by label. `recipe` names the arithmetic and `twin` that of the twin. `spent` says
    what the `seconds` of the command went into; the rest is its start and small things. `held_out` has a record for
    each role and metric; it is empty in documents of older releases. `card` is what the model card repeats of the
    source's: base model and licence.
    """

    kind: str = "finetune"
    name: str
    recipe: str
    twin: str | None
    task: str
    facts: dict[str, str]
    runs: tuple[RunRecord, ...]
    gaps: tuple[GapRecord, ...]
    spent: dict[str, float] = field(default_factory=dict)
    saved_as: str
    held_out: tuple[HeldOutRecord, ...] = ()
    gates: tuple[GateRecord, ...] = ()
    card: dict[str, str] = field(default_factory=dict)

    def learned(self, role: str) -> bool | None:
        """Whether the runs of a role learned anything that the held-out examples show; None where nobody can say.

        A metric must have improved, and accuracy must be better than that of naming the largest class.
        """
        found = [r for r in self.held_out if r.role == role]
        if not found:
            return None
        return any(r.improved for r in found) and all(r.beats_baseline for r in found if r.metric == "eval_accuracy")
