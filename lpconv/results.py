"""What a run found, as plain frozen records. Reports turn records into text; nothing here knows tensors.

Every record becomes JSON by `to_json` and comes back by `from_json`; the documents carry `schema_version`.
Sizes are bytes, times are seconds, errors are relative to the source's elements unless a name says otherwise.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lpconv.errors import InputError

__all__ = [
    "SCHEMA_VERSION",
    "ByteCounts",
    "ConvertResult",
    "FileRecord",
    "GateRecord",
    "HashCheck",
    "LogitsCheck",
    "PlanResult",
    "SourceRecord",
    "TensorRecord",
    "VerifyResult",
    "WeightsCheck",
    "from_json",
    "to_json",
]

SCHEMA_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint. `sha256` is None where nobody has read the whole file."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """Where the weights came from. `name` is what the user typed, `resolved` the hub id or directory it meant."""

    name: str
    resolved: str
    revision: str | None = None
    files: tuple[FileRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What happened to one tensor, and what it cost.

    `action`: ``convert``, ``keep`` (bit-identical), or ``tie`` (not stored: it shares the weight named by `tied_to`).
    `format` is the number format on disk, `scale` the factor of the codes (None where there is none), `points` the
    number of low-bit rows that stand for the tensor's own (None unless multipoint wrote it). `rms` and `absmax`
    describe the source's finite elements. `sqnr_db` is 10·log10(Σx² / Σ(x - x̂)²), infinite where the form is exact;
    `max_rel_error` is the largest |x - x̂| / |x|. `num_saturated` elements lay beyond the format's largest number,
    `num_flushed` non-zero elements became zero. The measured fields are None for tensors nobody read.
    """

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    action: str
    format: str
    reason: str
    scale: float | None = None
    points: int | None = None
    tied_to: str | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    rms: float | None = None
    absmax: float | None = None
    sqnr_db: float | None = None
    max_rel_error: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    num_saturated: int = 0
    num_flushed: int = 0


@dataclass(frozen=True, kw_only=True)
class ByteCounts:
    """Weight bytes read from the source and written to the output."""

    read: int
    written: int


@dataclass(frozen=True, kw_only=True)
class HashCheck:
    """Files compared with SHA256SUMS."""

    num_files: int
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WeightsCheck:
    """Stored weights compared with the source's. `min_sqnr_db` belongs to tensor `worst`; infinite means exact.

    `num_elements_checked` elements were decoded from the file again and compared with the reference cast.
    """

    max_rel_error: float
    min_sqnr_db: float
    worst: str | None
    num_tensors: int
    num_elements_checked: int
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """Outputs of source and result on the same inputs. All None, with a `skipped` reason, where it was not run.

    `max_abs_diff` and `rel_error` (‖y - ŷ‖/‖y‖) are over all outputs; `top1_agreement` is the share of positions whose
    largest output has the same index; `mean_kl` is KL(source ‖ result) in nats per position.
    """

    max_abs_diff: float | None = None
    rel_error: float | None = None
    bit_equal: bool | None = None
    top1_agreement: float | None = None
    mean_kl: float | None = None
    model_class: str | None = None
    inputs: str | None = None
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class GateRecord:
    """One ``--gate``: the expression, the value it met, and whether that passed."""

    expression: str
    value: float | None
    passed: bool


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """The outcome of verification. `level` is the deepest level that ran; `problems` says in words what failed."""

    level: str
    passed: bool
    hash: HashCheck | None = None
    weights: WeightsCheck | None = None
    logits: LogitsCheck | None = None
    gates: tuple[GateRecord, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """What a conversion would do, from headers alone. `seconds` and `disk_free_bytes` are estimates of this machine."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "plan"
    method: str
    format: str
    output: str
    source: SourceRecord
    tensors: tuple[TensorRecord, ...]
    bytes: ByteCounts
    shards: tuple[FileRecord, ...]
    side_files: tuple[str, ...]
    memory_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    seconds: float
    workers: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConvertResult:
    """One finished conversion: what was asked, what was written, what it cost and how it was checked.

    `seconds` is the whole run, `weights_seconds` the part that read, encoded and wrote weights (None where it was not
    measured). `options` are the settings that shaped the bytes, `architecture` is config.json's first, `versions` the
    libraries'.
    """

    schema_version: int = SCHEMA_VERSION
    kind: str = "convert"
    method: str
    format: str
    residual: str | None = None
    output: str
    source: SourceRecord
    architecture: str | None = None
    tensors: tuple[TensorRecord, ...]
    files: tuple[FileRecord, ...]
    side_files: tuple[str, ...] = ()
    bytes: ByteCounts
    seconds: float
    weights_seconds: float | None = None
    peak_rss_bytes: int
    verify: VerifyResult
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    warnings: tuple[str, ...] = ()


def to_json(value: Any) -> Any:
    """Records, tuples and dicts as JSON-able values. Infinite numbers become "inf"/"-inf" and NaN becomes "nan"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_json(cls: type[T], data: Any) -> T:
    """The record of type `cls` in a JSON document; unknown keys are ignored, so that older readers open newer files.

    Raises InputError for a missing key or another `schema_version`.
    """
    try:
        return typing.cast(T, _decode(cls, data))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InputError(
            f"not a {cls.__name__} document: {e}", hint="was it written by another version of lpconv?"
        ) from e


def _decode(kind: Any, data: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return _decode(next(a for a in args if a is not type(None)), data)
    if origin is tuple:
        return tuple(_decode(args[0], v) for v in _checked(list, data))
    if dataclasses.is_dataclass(kind):
        return _decode_record(typing.cast(type, kind), data)
    if kind is float:
        return float(data)
    return _checked(dict if origin is dict else kind, data)


def _checked(kind: Any, data: Any) -> Any:
    if kind is not Any and type(data) is not kind:  # not isinstance: True is no number here
        raise TypeError(f"{data!r:.80} is no {kind.__name__}")
    return data


def _decode_record(cls: type, data: dict[str, Any]) -> Any:
    version = _checked(dict, data).get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version {version}, this lpconv reads {SCHEMA_VERSION}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    return cls(**{n: _decode(hints[n], data[n]) for n in names if n in data})


@dataclass(frozen=True, kw_only=True)
class DtypeRecord:
    """How much of a checkpoint one dtype makes up."""

    dtype: str
    num_tensors: int
    num_elements: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor as a file holds it: header facts, and statistics where its data was read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    size_bytes: int
    scale: float | None = None
    rms: float | None = None
    absmax: float | None = None
    num_nan: int = 0
    num_inf: int = 0


@dataclass(frozen=True, kw_only=True)
class InspectResult:
    """What a checkpoint holds, from headers alone. `method` and `format` are None where lpconv did not write it.

    `ties` maps the name of a tensor that is not stored to the weight it shares. `problems` says in words what is wrong
    with the headers or the index.
    """

    schema_version: int = SCHEMA_VERSION
    kind: str = "inspect"
    path: str
    architecture: str | None = None
    method: str | None = None
    format: str | None = None
    dtypes: tuple[DtypeRecord, ...] = ()
    shards: tuple[FileRecord, ...] = ()
    ties: dict[str, str] = field(default_factory=dict)
    tensors: tuple[StoredTensor, ...] = ()
    problems: tuple[str, ...] = ()


__all__ += ["DtypeRecord", "InspectResult", "StoredTensor"]


@dataclass(frozen=True, kw_only=True)
class FormatRates:
    """What one format does to a tensor at one loss scale: shares of its finite elements that are not zero.

    `sqnr_db` is an estimate, infinite where the format holds every value and NaN where there is no signal. `fits` says
    that next to nothing is lost (`lpconv.probe.advice.fits`), `fits_own_scale` that so it would be with a power of two
    of the tensor's own in place of the loss scale.
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
        """The share of elements that become zero or lie beyond the range."""
        return self.underflow + self.overflow


@dataclass(frozen=True, kw_only=True)
class ProbedRecord:
    """One role of one layer (`words` say it): where its elements lie and what formats do to it.

    `exponents` counts the elements by floor(log2|x|), lowest first. `plain` has the rates at loss scale 1, `scaled`
    those at the scale recommended for each format, which differ for gradients only; both in the order of the report's
    formats.
    """

    layer: str
    role: str
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
    """The power of two recommended for the loss in one format, and the worst gradient's underflow at 1 and there.

    `max_log2_scale` is the largest that leaves headroom above the largest gradient seen.
    """

    format: str
    log2_scale: int
    max_log2_scale: int
    worst_underflow_before: float
    worst_underflow_after: float


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """Answers from a probe's histograms for a few formats. `findings` holds each format's worst tensors in words.

    `classes` are the roles in words, in the order of a training step. `facts` says how the probe was run, label by
    label. `overhead` is the time of recording as a share of the rest.
    """

    schema_version: int = SCHEMA_VERSION
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
    warnings: tuple[str, ...] = ()


__all__ += ["FormatRates", "LossScaleRecord", "ProbeReport", "ProbedRecord"]


@dataclass(frozen=True, kw_only=True)
class RatioRecord:
    """Baseline time over this row's time, above 1 where this row is faster, and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class TimingRecord:
    """Times of one step. `clock` says what took them ("CUDA events" or "wall"); `wall_median_s` is always wall time.

    `p99_s` is None below 100 samples.
    """

    num_samples: int
    num_rounds: int
    clock: str
    median_s: float
    p10_s: float
    p90_s: float
    p99_s: float | None
    wall_median_s: float


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of tensors alive at the moment of the peak, by what they are. `other` are temporaries and inputs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    other: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Memory of one step. `peak_bytes` is the most that tensors took up at once.

    `saved_bytes` is what the forward pass keeps for the backward pass, `reserved_bytes` what CUDA's allocator holds
    (None on a CPU), `process_bytes` the resident process, or its GPU memory, at its peak.
    """

    peak_bytes: int
    saved_bytes: int
    reserved_bytes: int | None
    process_bytes: int
    parts: MemoryParts


@dataclass(frozen=True, kw_only=True)
class NumericsRecord:
    """Relative errors ‖y - ŷ‖/‖y‖ against the same weights in fp32.

    `gradient_error` is over the vectors (norms, biases) of the first block, where the whole backward pass arrives; None
    for inference.
    """

    output_error: float
    gradient_error: float | None


@dataclass(frozen=True, kw_only=True)
class EnergyRecord:
    """GPU energy over a window of `window_s` seconds. The joules are None where `unavailable` says why."""

    joules_per_step: float | None = None
    joules_per_token: float | None = None
    window_s: float | None = None
    unavailable: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuRecord:
    """What NVML said after a measurement; None where it does not know. `foreign_processes` are pids not ours."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    power_limit_w: float | None
    throttle_reasons: tuple[str, ...] = ()
    foreign_processes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GemmRecord:
    """One shape of Linear, y_MN = x_MK @ w_NKᵀ, `count` times in the model, by the roofline of the measured peaks.

    `gain` is the predicted time of its products in the baseline's 16 bits over that in fp8 with its casts, and
    `break_even_tokens` the smallest M (a power of two) at which that exceeds 1; None where fp8 is emulated or never
    gains.
    """

    names: tuple[str, ...]
    count: int
    m: int
    n: int
    k: int
    flops: float
    bytes_moved: float
    bound: str
    gain: float | None
    break_even_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class PeakRecord:
    """What this machine was measured to do, not what its data sheet says. `fp8_flops` is None where it is emulated."""

    bf16_flops: float
    fp32_flops: float
    fp8_flops: float | None
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One configuration at one batch and sequence length.

    `status` is "ok", "skipped" (something is missing), "too large" (would not fit, see `estimate_bytes`) or "failed";
    `reason` says why where it is not ok. `emulated` says that the format is decoded to a wider one before products.
    `recompiles` are those after the warm-up. `baseline` names what `ratio` is relative to.
    """

    model: str
    weights: str
    layers: int
    format: str
    method: str
    optimizer: str | None
    compiled: str
    mode: str
    batch: int
    seq: int
    device: str
    emulated: bool
    baseline: str
    is_baseline: bool
    status: str
    reason: str | None = None
    ratio: RatioRecord | None = None
    tokens_per_s: float | None = None
    peak_memory: int | None = None
    estimate_bytes: int | None = None
    timing: TimingRecord | None = None
    memory: MemoryRecord | None = None
    numerics: NumericsRecord | None = None
    energy: EnergyRecord | None = None
    gpu: GpuRecord | None = None
    compile_s: float | None = None
    recompiles: int | None = None
    round_medians_s: tuple[float, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None

    @property
    def name(self) -> str:
        """Format, method and optimizer, as far as they say something."""
        parts = [self.format, "" if self.method == "plain" else self.method]
        parts.append("" if self.optimizer in (None, "adamw") else str(self.optimizer))
        return " ".join(p for p in parts if p)

    @property
    def key(self) -> tuple[str, ...]:
        """What tells rows of two documents apart: everything that was asked for."""
        shape = (self.model, str(self.layers), self.mode, str(self.batch), str(self.seq), self.compiled)
        return (*shape, self.format, self.method, self.optimizer or "", self.device, self.baseline)


@dataclass(frozen=True, kw_only=True)
class VerdictRecord:
    """What low precision buys at one model, mode, batch and sequence length, in sentences, with the roofline."""

    title: str
    sentences: tuple[str, ...]
    gemms: tuple[GemmRecord, ...]


@dataclass(frozen=True, kw_only=True)
class BenchChange:
    """One row against the same row of an older document: both ratios, and whether the intervals lie apart."""

    name: str
    before: RatioRecord
    after: RatioRecord
    change: str


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A run of `lpconv bench`. `interrupted` says that rows are missing because somebody stopped it."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "bench"
    rows: tuple[BenchRow, ...]
    peaks: PeakRecord | None = None
    verdicts: tuple[VerdictRecord, ...] = ()
    gates: tuple[GateRecord, ...] = ()
    changes: tuple[BenchChange, ...] = ()
    notes: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    seconds: float = 0.0
    interrupted: bool = False


__all__ += [
    "BenchChange",
    "BenchResult",
    "BenchRow",
    "EnergyRecord",
    "GemmRecord",
    "GpuRecord",
    "MemoryParts",
    "MemoryRecord",
    "NumericsRecord",
    "PeakRecord",
    "RatioRecord",
    "TimingRecord",
    "VerdictRecord",
]


@dataclass(frozen=True, kw_only=True)
class TrackedRecord:
    """What a format did to one class of tensor of one layer at one step: shares of its elements that are not zero."""

    step: int
    layer: str
    role: str
    format: str
    underflow: float
    overflow: float


@dataclass(frozen=True, kw_only=True)
class UpdateQuality:
    """What reached memory of the update of one step (Collage: effective descent quality; `lpconv.optim.diagnostics`).

    `edq` is over the intended update's norm, of everything kept; `edq_weights` of the 16-bit weights alone. `lost` is
    the share of meant changes that left everything as it was.
    """

    step: int
    edq: float
    edq_weights: float
    lost: float


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Where the memory of a training step went at its peak, by part, in bytes.

    `measured_bytes` is the peak as another instrument saw it, named by `instrument`.
    """

    parts: dict[str, int]
    measured_bytes: int
    instrument: str


@dataclass(frozen=True, kw_only=True)
class LayerChange:
    """What one layer did to the loss; negative helped. `rounding` is the part of `change` that rounding caused.

    `helped` is the share of its moved elements that lowered the loss, None where none moved.
    """

    layer: str
    change: float
    rounding: float
    helped: float | None


@dataclass(frozen=True, kw_only=True)
class LossAllocation:
    """The change of the loss on the first `num_batches` held-out batches, allotted to layers (`lpconv.probe.lca`).

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
    """The first value that was Inf or NaN: at which step, in which layer, forward or backward, what was done."""

    step: int
    layer: str
    direction: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Series:
    """A figure over the steps of a run, counted from 1; step 0 is the model before training."""

    name: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One training run; `evaluations` has one series per held-out metric.

    `role` is ``run`` or ``twin``. `step_time_s` is the median over steps that recorded nothing, `overhead` the time of
    recording as a share of the rest.
    """

    role: str
    seed: int
    losses: Series
    evaluations: tuple[Series, ...]
    loss_scales: Series
    num_skipped: int = 0
    step_time_s: float | None = None
    overhead: float = 0.0
    tracked: tuple[TrackedRecord, ...] = ()
    updates: tuple[UpdateQuality, ...] = ()
    memory: PeakMemory | None = None
    first_nonfinite: NonfiniteRecord | None = None
    loss_allocation: LossAllocation | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GapRecord:
    """A held-out metric of the run beside its twin's after the last step: means over seeds.

    `gap` is run less twin. `half_width` is that of its 95 % interval from paired seeds (Student's t), `noise` the
    standard deviation of the twin from seed to seed; both None with one seed.
    """

    metric: str
    run: float
    twin: float
    gap: float
    half_width: float | None = None
    noise: float | None = None

    @property
    def exceeds_noise(self) -> bool | None:
        """Whether the interval leaves zero out; None where one seed cannot say."""
        return None if self.half_width is None else abs(self.gap) > self.half_width


@dataclass(frozen=True, kw_only=True)
class FinetuneResult:
    """A finished fine-tuning: the run, its twin, both over all seeds, and what was learnt from the comparison.

    `facts` says how it was run, label by label. `recipe` names the arithmetic and `twin` that of the twin.
    """

    schema_version: int = SCHEMA_VERSION
    kind: str = "finetune"
    name: str
    output: str
    recipe: str
    twin: str | None
    task: str
    facts: dict[str, str]
    runs: tuple[RunRecord, ...]
    gaps: tuple[GapRecord, ...]
    seconds: float
    saved_as: str
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str | None = None
    warnings: tuple[str, ...] = ()


__all__ += [
    "FinetuneResult",
    "GapRecord",
    "LayerChange",
    "LossAllocation",
    "NonfiniteRecord",
    "PeakMemory",
    "RunRecord",
    "Series",
    "TrackedRecord",
    "UpdateQuality",
]
