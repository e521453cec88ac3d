"""Records of `lpconv bench`."""

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
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Memory of one step. `peak_bytes` is the maximum over time of all live tensors, `parts` its parts.

    `saved_bytes` is kept by the forward pass for the backward pass (None for CUDA graphs, which hide it),
    `reserved_bytes` is held by CUDA's allocator (None on a CPU), `process_bytes` is the peak of the process's resident
    or GPU memory (0 if only the step was measured).
    """

    peak_bytes: int
    saved_bytes: int | None
    reserved_bytes: int | None = None
    process_bytes: int = 0
    parts: MemoryParts


@dataclass(frozen=True, kw_only=True)
class NumericsRecord:
    """Relative errors ‖y - ŷ‖/‖y‖ compared with the same weights in fp32.

    `gradient_error` is over the vectors (norms, biases) of the first block, whose gradients depend on the whole
    backward pass; None for inference.
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
    """GPU state reported by NVML after a measurement; unknown values are None.

    `foreign_processes` are ids of other users' processes.
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

    `gain` is the predicted time in 16 bits divided by the time in fp8 including casts,
    `break_even_tokens` the smallest M (a power of two) with a gain above 1; None if fp8 is emulated or never gains.
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

    `batch` is per process; `parallel` is the way in which several processes cooperate, None for one.
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
    `reason` explains any status but "ok". `emulated`: the format is decoded to a wider one before products.
    `recompiles` are counted after the warm-up. `baseline` names the reference of `ratio`, and `baseline_median_s` is
    the median time of its step while this row was measured. With several `processes`, memory is per process, times are
    of the slowest, and `tokens_per_s` is the total.
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
        """Format, method and optimizer, without the defaults."""
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
        """Settings that identify the row across documents."""
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
    """Comparison of one row with the same row of an older document: both ratios, and whether they differ.

    `change` is by disjoint intervals. `before` or `after` is None if that document has no such row, or did not measure
    it.
    """

    name: str
    before: RatioRecord | None
    after: RatioRecord | None
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
