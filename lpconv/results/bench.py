"""What `lpconv bench` found."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.documents import Result
from lpconv.results.verify import GateRecord


@dataclass(frozen=True, kw_only=True)
class RatioRecord:
    """Time of the baseline divided by the time of this row (above 1: this row is faster), with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class TimingRecord:
    """Step times. `clock` is the timer ("CUDA events" or "wall"); `wall_median_s` is always wall-clock time.

    `p99_s` is None below 100 samples.
    """

    num_samples: int
    num_rounds: int
    num_launches: int = 1
    clock: str
    median_s: float
    p10_s: float
    p90_s: float
    p99_s: float | None
    wall_median_s: float


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of live tensors at the peak, by kind. `other` are temporaries and inputs."""

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
    """Memory of one step. `peak_bytes` is the maximum of all live tensors, and `parts` are its parts.

    `saved_bytes` is what the forward pass keeps for the backward pass (None of CUDA graphs, which hide it),
    `reserved_bytes` what CUDA's allocator holds (None on a CPU), `process_bytes` the resident process, or its GPU
    memory, at its peak (0 if only the step was looked at).
    """

    peak_bytes: int
    saved_bytes: int | None
    reserved_bytes: int | None = None
    process_bytes: int = 0
    parts: MemoryParts


@dataclass(frozen=True, kw_only=True)
class NumericsRecord:
    """Relative errors ‖y - ŷ‖/‖y‖ with respect to the same weights in fp32.

    `gradient_error` is over the vectors (norms, biases) of the first block, where the whole backward pass arrives; None
    for inference.
    """

    output_error: float
    gradient_error: float | None


@dataclass(frozen=True, kw_only=True)
class EnergyRecord:
    """GPU energy over a window of `window_s` seconds. The joules are None if `unavailable` gives a reason."""

    joules_per_step: float | None = None
    joules_per_token: float | None = None
    window_s: float | None = None
    unavailable: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuRecord:
    """GPU state that NVML reported after a measurement; unknown values are None.

    `foreign_processes` are process ids of others.
    """

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    power_limit_w: float | None
    throttle_reasons: tuple[str, ...] = ()
    foreign_processes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GemmRecord:
    """Roofline estimate of one matrix product, y_MN = x_MK @ w_NKᵀ, that occurs `count` times in the model.

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
    """Measured peak rates of this machine. `fp8_flops` is None if fp8 products are emulated."""

    bf16_flops: float
    fp32_flops: float
    fp8_flops: float | None
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One configuration at one batch size and sequence length. `layers` None keeps the model's own number.

    `batch` is that of each process; `parallel` says how several work together, None for one.
    """

    model: str
    layers: int | None
    format: str
    method: str
    optimizer: str | None
    compiled: str
    mode: str
    batch: int
    seq: int
    device: str
    processes: int = 1
    parallel: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchRow(BenchCase):
    """Measurements of one configuration.

    `status` is "ok", "skipped" (something is missing), "too large" (would not fit, see `estimate_bytes`) or "failed";
    `reason` says why where it is not ok. `emulated` says that the format is decoded to a wider one before products.
    `recompiles` are those after the warm-up. `baseline` names what `ratio` is relative to, and `baseline_median_s` is
    the median time of its step while this row was measured. With several `processes`, memory is that of one, times are
    those of the slowest, and `tokens_per_s` is of all.
    """

    weights: str
    layers: int
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
    baseline_median_s: float | None = None
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
    def place(self) -> str:
        """Mode and sizes: train, 4 x 128, 2 processes (ddp)."""
        together = f", {self.processes} processes ({self.parallel})" if self.parallel else ""
        return f"{self.mode}, {self.batch} x {self.seq}{together}"

    @property
    def key(self) -> tuple[str, ...]:
        """What tells rows of two documents apart: everything that was asked for."""
        shape = (self.model, str(self.layers), self.mode, str(self.batch), str(self.seq), self.compiled)
        together = (str(self.processes), self.parallel or "")
        return (*shape, self.format, self.method, self.optimizer or "", self.device, self.baseline, *together)


@dataclass(frozen=True, kw_only=True)
class VerdictRecord:
    """Conclusion for one model, mode, batch size and sequence length, in sentences, with the roofline."""

    title: str
    sentences: tuple[str, ...]
    gemms: tuple[GemmRecord, ...]


@dataclass(frozen=True, kw_only=True)
class BenchChange:
    """One row compared with the same row of an older document: both ratios, and whether their intervals are disjoint.

    `before` is None where the older document has no such row.
    """

    name: str
    before: RatioRecord | None
    after: RatioRecord
    change: str


@dataclass(frozen=True, kw_only=True)
class BenchResult(Result):
    """Result of `lpconv bench`. `interrupted` means that rows are missing because the run was stopped."""

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
