"""What `lpconv convert` and `restore` found."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.checkpoint import FileRecord, SourceRecord
from lpconv.results.documents import Result, RunResult
from lpconv.results.verify import VerifyResult


@dataclass(frozen=True, kw_only=True)
class RoundingRecord:
    """How error feedback rounded one tensor, on `num_inputs` inputs of its layer from the calibration text.

    `output_error` is the share ‖(W - Q)X‖² / ‖WX‖² of the layer's output that rounding changes, `nearest_error` that of
    rounding to nearest with the same scales. No number is further than `max_steps` times its scale from the source's.
    `sha256` is the hash of what is stored.
    """

    output_error: float
    nearest_error: float
    num_inputs: int
    max_steps: float
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Outcome of converting one tensor, with its error and size.

    `action`: ``convert``, ``keep`` (bit-identical), or ``tie`` (not stored: it shares the weight named by `tied_to`).
    `format` is the number format on disk, `scale` the factor of the codes (None where there is none), `points` the
    number of low-bit rows that stand for the tensor's own (None unless multipoint wrote it). `rms` and `absmax`
    describe the source's finite elements. `sqnr_db` is 10·log10(Σx² / Σ(x - x̂)²), infinite where the form is exact;
    `max_rel_error` is the largest |x - x̂| / |x|. `num_saturated` elements lay beyond the format's largest number,
    `num_flushed` non-zero elements became zero. `on_grid` says that the source lay on a grid of codes of this form
    already, and that decoded numbers, rounded to the source's dtype, are its own; `grid` is a format on whose grid its
    first numbers lie, if they do. `rounding` is there for error feedback only. The measured fields are None for tensors
    nobody read.
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
    on_grid: bool = False
    grid: str | None = None
    rounding: RoundingRecord | None = None


@dataclass(frozen=True, kw_only=True)
class ByteCounts:
    """Weight bytes read from the source and written to the output."""

    read: int
    written: int


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """Resources that a run is expected to need. `seconds` and `disk_free_bytes` are estimates for this machine."""

    memory_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlanResult(Result, JobEstimate):
    """What a conversion would do, from headers alone."""

    kind: str = "plan"
    method: str
    format: str
    output: str
    source: SourceRecord
    tensors: tuple[TensorRecord, ...]
    bytes: ByteCounts
    shards: tuple[FileRecord, ...]
    side_files: tuple[str, ...]
    workers: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord:
    """The text of a calibration, and the largest input of each module whose inputs have a scale in the file."""

    text: str
    sha256: str
    num_tokens: int
    seq_len: int
    absmax: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ConvertResult(RunResult):
    """Result of a conversion: what was asked, what was written, what it cost and how it was verified.

    `weights_seconds` is the time that read, encoded and wrote weights (None if it was not measured). `architecture` is
    config.json's first. `card` is what the model card repeats of the source's: base model and licence. `calibration` is
    None if inputs have no scales in the files.
    """

    kind: str = "convert"
    method: str
    format: str
    residual: str | None = None
    source: SourceRecord
    architecture: str | None = None
    tensors: tuple[TensorRecord, ...]
    files: tuple[FileRecord, ...]
    side_files: tuple[str, ...] = ()
    bytes: ByteCounts
    weights_seconds: float | None = None
    peak_rss_bytes: int
    verify: VerifyResult
    calibration: CalibrationRecord | None = None
    card: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class InitResult(ConvertResult):
    """A fresh checkpoint, and the share of its activations, gradients and weight gradients with unit size at the first
    step.
    """

    unit_shares: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """Files that were written together, with their hashes: `shard` names the one that holds the weights themselves."""

    shard: str
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True, kw_only=True)
class PartResult(Result):
    """Result of converting part `part` of `parts` of one conversion into `output`.

    `bytes` are those of its own files; `identity` is what all parts of the output have to agree on.
    """

    kind: str = "part"
    part: int
    parts: int
    output: str
    shards: tuple[WrittenShard, ...]
    bytes: ByteCounts
    seconds: float
    peak_rss_bytes: int
    identity: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RestoreResult(Result):
    """Result of restoring a plain checkpoint from a converted one or from a third-party quantized one.

    `exact` says that its bytes are the source's, as far as hashes and figures of the conversion tell. Of a checkpoint
    of others it says that `dtype`, which is None for ours, holds every decoded value; `method` is its quant_method.
    """

    kind: str = "restore"
    path: str
    output: str
    method: str
    exact: bool
    dtype: str | None = None
    num_tensors: int
    files: tuple[FileRecord, ...]
