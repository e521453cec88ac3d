"""Records of stored checkpoints, and of the commands that read and write them: inspect, convert, restore, export."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.documents import Result, RunResult
from lpconv.results.verify import VerifyResult


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint. `sha256` is None if it is not known."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """Origin of the weights. `name` is the user's input, `resolved` the hub id or directory that it means."""

    name: str
    resolved: str
    revision: str | None = None
    files: tuple[FileRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DtypeRecord:
    """Share of a checkpoint's tensors and bytes that one dtype makes up."""

    dtype: str
    num_tensors: int
    num_elements: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor as stored in a file: header fields, and statistics if its data was read.

    `stored_as` describes converted or quantised tensors. Statistics are of unscaled codes for lpconv outputs, and of
    decoded weights for third-party checkpoints; there `saturated_share` is the share of codes at the end of their
    range.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    size_bytes: int
    stored_as: str | None = None
    scale: float | None = None
    rms: float | None = None
    absmax: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    saturated_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class InspectResult(Result):
    """Contents of a checkpoint, from its headers. `method` and `format` are None if lpconv did not write it.

    `layout` is the `quant_method` of a quantised checkpoint; `bits_per_weight` is for weights below 16 bits, including
    scales. `ties` maps names of tensors that are not stored to the weights that they share. `problems` are descriptions
    of errors, `warnings` of oddities. They cover the checks in `checked` but not those in `not_checked`; `not_judged`
    is the reason if lpconv cannot interpret the weights, else None.
    """

    kind: str = "inspect"
    path: str
    architecture: str | None = None
    method: str | None = None
    format: str | None = None
    layout: str | None = None
    bits_per_weight: float | None = None
    dtypes: tuple[DtypeRecord, ...] = ()
    shards: tuple[FileRecord, ...] = ()
    ties: dict[str, str] = field(default_factory=dict)
    tensors: tuple[StoredTensor, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    not_judged: str | None = None


@dataclass(frozen=True, kw_only=True)
class RoundingRecord:
    """Codes of one tensor that are not the nearest ones: from error feedback, or from training (`finetune --recover`).

    Every number is within `max_steps` times its scale of the source's. `sha256` is the hash of the stored components.

    Error feedback used `num_inputs` inputs of the tensor's layer from the calibration text. `output_error` is
    ‖(W - Q)X‖² / ‖WX‖², the relative squared error of the layer's output due to rounding, and `nearest_error` the same
    for rounding to nearest with equal scales. All three are None for trained codes. A tensor that holds several experts
    has the inputs of each in `expert_inputs`; `num_nearest` of them were rounded to nearest, because no input reaches
    them.
    """

    output_error: float | None = None
    nearest_error: float | None = None
    num_inputs: int | None = None
    max_steps: float
    sha256: str
    num_nearest: int = 0
    expert_inputs: tuple[int, ...] = ()


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
    """Resources that a run is expected to need. `seconds` and `disk_free_bytes` are estimates for this machine.

    `seconds` is None for a rounding with error feedback that was not measured.
    """

    memory_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RoundingForecast:
    """Time and memory of a rounding with error feedback, from its first `num_measured` layers.

    `layer_seconds` are of all layers: those that were not measured are scaled by the sizes of their weights.
    `opening_seconds` is the time to open the model and to run its embeddings, `peak_rss_bytes` the peak of the process.
    """

    num_measured: int
    layer_seconds: tuple[float, ...]
    opening_seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanResult(Result, JobEstimate):
    """The plan of a conversion, from headers alone, but for `measured`."""

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
    measured: RoundingForecast | None = None
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

    @property
    def has_finer_scales(self) -> bool:
        """Whether scales are finer than one per tensor."""
        return bool(self.options.get("granularity", "tensor") != "tensor")


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


@dataclass(frozen=True, kw_only=True)
class PackResult(RestoreResult):
    """Result of packing a checkpoint. A dry run has no `files`, and estimates the bytes to write."""

    kind: str = "pack"
    method: str = "pack"
    exact: bool = True
    bytes: ByteCounts


@dataclass(frozen=True, kw_only=True)
class FormatCount:
    """Number of weights of an ONNX graph that are stored in one form, such as ``e4m3fn × scale`` or ``bf16 + bf16``.

    Tensors with equal elements are stored once and count once.
    """

    form: str
    num_tensors: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class OnnxCheck:
    """Comparison of the ONNX file in ONNX Runtime with the model in PyTorch, on the same inputs, both in fp32.

    `max_abs_diff` is over all outputs of all `cases` (descriptions of input shapes), `max_rel_diff` relative to the
    largest element of an output; both are infinite if finiteness differs between the two sides.
    """

    runtime: str
    cases: tuple[str, ...]
    max_abs_diff: float
    max_rel_diff: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the largest relative difference is within the tolerance."""
        return self.max_rel_diff <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class ExportResult(Result):
    """Result of an export. `method` and `format` are None if lpconv did not convert the checkpoint.

    `weights` counts the graph's parameters by stored form. `check` is None if no validation was requested.
    """

    kind: str = "onnx"
    source: SourceRecord
    output: str
    architecture: str
    method: str | None
    format: str | None
    opset: int
    inputs: dict[str, tuple[str, ...]]
    outputs: dict[str, tuple[str, ...]]
    weights: tuple[FormatCount, ...]
    files: tuple[FileRecord, ...]
    check: OnnxCheck | None
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
