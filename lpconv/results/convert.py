"""Records of `lpconv convert` and `restore`."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.checkpoint import FileRecord, SourceRecord
from lpconv.results.documents import Result, RunResult
from lpconv.results.verify import VerifyResult


@dataclass(frozen=True, kw_only=True)
class RoundingRecord:
    """Codes of one tensor that are not the nearest ones: from error feedback, or from training (`finetune --recover`).

    Every number is within `max_steps` times its scale of the source's. `sha256` is the hash of the stored components.

    Error feedback used `num_inputs` inputs of the tensor's layer from the calibration text. `output_error` is
    ‖(W - Q)X‖² / ‖WX‖², the relative squared error of the layer's output due to rounding, and `nearest_error` the same
    for rounding to nearest with equal scales. All three are None for trained codes. `num_nearest` of the experts in the
    tensor were rounded to nearest, because no input reaches them.
    """

    output_error: float | None = None
    nearest_error: float | None = None
    num_inputs: int | None = None
    max_steps: float
    sha256: str
    num_nearest: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Outcome of converting one tensor, with its error and size.

    `action`: ``convert``, ``keep`` (bit-identical), or ``tie`` (not stored: it shares the weight `tied_to`). `format`
    is the number format on disk, `scale` the factor of the codes (None if there is no single one), `points` the number
    of low-bit rows stored for the tensor's rows (None unless multipoint wrote it). `rms` and `absmax` are over the
    source's finite elements. `sqnr_db` is 10·log10(Σx² / Σ(x - x̂)²), infinite if the form is exact; `max_rel_error` is
    the largest |x - x̂| / |x|. `num_saturated` elements exceeded the format's range, `num_flushed` nonzero elements
    became zero. `on_grid`: the source was already on a grid of codes of this form, and decoding, rounded to the
    source's dtype, returns the source; `grid` is a format whose grid contains the tensor's first numbers, if there is
    one. `rounding` is set for error feedback only. Measured fields are None for tensors that were not read.
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
    """The plan of a conversion, from headers alone."""

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
    """The calibration text, and the largest input of each module that stores an input scale."""

    text: str
    sha256: str
    num_tokens: int
    seq_len: int
    absmax: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ConvertResult(RunResult):
    """Result of a conversion: options, output, errors and verification.

    `weights_seconds` is the time of reading, encoding and writing weights (None if not measured). `architecture` is the
    first in config.json. `card` are facts of the source's model card that the output repeats: base model and licence.
    `calibration` is None if no text was used.
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
    """A fresh checkpoint, with the shares of tensors (by role) that have unit size at the first step."""

    unit_shares: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """Files written together, with their hashes. `shard` is the name of the file with the weights."""

    shard: str
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True, kw_only=True)
class PartResult(Result):
    """Result of converting part `part` of `parts` of one conversion into `output`.

    `bytes` are those of its own files; `identity` are the facts that all parts of the output must share.
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
    """Result of restoring a plain checkpoint from a converted or third-party quantised one.

    `exact`: the bytes are the source's, according to hashes and record of the conversion; for a third-party checkpoint,
    `dtype` (None for lpconv outputs) represents every decoded value, and `method` is its quant_method.
    """

    kind: str = "restore"
    path: str
    output: str
    method: str
    exact: bool
    dtype: str | None = None
    num_tensors: int
    files: tuple[FileRecord, ...]
