"""What `lpconv convert`, `verify` and `restore` found."""

from dataclasses import dataclass, field
from typing import Any

from lpconv.results.checkpoint import FileRecord, SourceRecord
from lpconv.results.documents import SCHEMA_VERSION

__all__ = [
    "ByteCounts",
    "ComparedTensor",
    "ConvertResult",
    "GateRecord",
    "HashCheck",
    "LogitsCheck",
    "PartResult",
    "PlanResult",
    "PushResult",
    "RepairResult",
    "RepairedTensor",
    "RestoreResult",
    "TensorRecord",
    "Verification",
    "VerifyResult",
    "WeightsCheck",
    "WrittenShard",
]


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What happened to one tensor, and what it cost.

    `action`: ``convert``, ``keep`` (bit-identical), or ``tie`` (not stored: it shares the weight named by `tied_to`).
    `format` is the number format on disk, `scale` the factor of the codes (None where there is none), `points` the
    number of low-bit rows that stand for the tensor's own (None unless multipoint wrote it). `rms` and `absmax`
    describe the source's finite elements. `sqnr_db` is 10·log10(Σx² / Σ(x - x̂)²), infinite where the form is exact;
    `max_rel_error` is the largest |x - x̂| / |x|. `num_saturated` elements lay beyond the format's largest number,
    `num_flushed` non-zero elements became zero. `on_grid` says that the source lay on a grid of codes of this form
    already, and that decoded numbers, rounded to the source's dtype, are its own; `grid` is a format on whose grid its
    first numbers lie, if they do. The measured fields are None for tensors nobody read.
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

    `num_elements_checked` of `num_elements` were converted again, and decoded from the file and compared with the
    reference cast. `miss_probability` is the chance that one bad block somewhere in the weights was not among them.
    """

    max_rel_error: float
    min_sqnr_db: float
    worst: str | None
    num_tensors: int
    num_elements_checked: int
    num_elements: int | None = None
    miss_probability: float | None = None
    mismatched: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LogitsCheck:
    """Outputs of source and result on the same inputs. All None, with a `skipped` reason, where it was not run.

    `max_abs_diff` and `rel_error` (‖y - ŷ‖/‖y‖) are over all outputs that are finite of the source, and are infinite or
    NaN where the result's are; `top1_agreement` is the share of positions whose
    largest output has the same index; `mean_kl` is KL(source ‖ result) in nats per position. On a text `reverse_kl` is
    KL(result ‖ source), and the perplexities are of the next token, None where a model predicts another one.
    """

    max_abs_diff: float | None = None
    rel_error: float | None = None
    bit_equal: bool | None = None
    top1_agreement: float | None = None
    mean_kl: float | None = None
    reverse_kl: float | None = None
    perplexity: float | None = None
    source_perplexity: float | None = None
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
class ComparedTensor:
    """One weight beside a reference's, each in whatever form. `num_off` of `num_groups` are off by a factor.

    Where a conversion was made again, no groups are asked: what is stored is right, or `problem`.
    """

    name: str
    stored_as: str
    reference: str
    sqnr_db: float
    max_rel_error: float
    num_groups: int = 0
    num_off: int = 0
    problem: str | None = None


_SHOWN = 3  # problems in the sentence of an error


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """The outcome of verification. `level` is the deepest level that ran; `problems` says in words what failed.

    `tensors` are those that were compared, the worst first: at the level ``values``, which compares any two
    checkpoints, those of both.
    """

    level: str
    passed: bool
    hash: HashCheck | None = None
    weights: WeightsCheck | None = None
    logits: LogitsCheck | None = None
    gates: tuple[GateRecord, ...] = ()
    problems: tuple[str, ...] = ()
    tensors: tuple[ComparedTensor, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """The problems, and the gates that failed with the values they met."""
        missed = [g for g in self.gates if not g.passed]
        values = ("nothing" if g.value is None else f"{g.value:.6g}" for g in missed)
        gates = (f"gate `{g.expression}` met {value}" for g, value in zip(missed, values, strict=True))
        return (*self.problems, *gates)

    @property
    def failure(self) -> str:
        """The first of `failures`, and how many there are besides: a sentence for an error."""
        shown, rest = self.failures[:_SHOWN], len(self.failures) - _SHOWN
        return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")


@dataclass(frozen=True, kw_only=True)
class Verification(VerifyResult):
    """A run of `lpconv verify`: of the output or checkpoint `path`, beside the model `against` where one was named."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "verify"
    path: str
    against: str | None = None
    command: str
    version: str


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
    libraries'. `card` is what the model card repeats of the source's: base model and licence.
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
    card: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WrittenShard:
    """Files that were written together, with their hashes: `shard` names the one that holds the weights themselves."""

    shard: str
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """Part number `part` of the `parts` that one conversion into `output` was cut into.

    `bytes` are those of its own files; `identity` is what all parts of the output have to agree on.
    """

    schema_version: int = SCHEMA_VERSION
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
class RestoreResult:
    """A plain checkpoint made from a converted one, or from one that others quantised.

    `exact` says that its bytes are the source's, as far as hashes and figures of the conversion tell. Of a checkpoint
    of others it says that `dtype`, which is None for ours, holds every decoded value; `method` is its quant_method.
    """

    schema_version: int = SCHEMA_VERSION
    kind: str = "restore"
    path: str
    output: str
    method: str
    exact: bool
    dtype: str | None = None
    num_tensors: int
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, kw_only=True)
class RepairedTensor:
    """A weight that got another scale: ``inverted`` or ``rescaled``, and what that changed of its numbers.

    `before` and `after` are the one scale that the tensor has, None where its blocks have one each and all were
    inverted. `num_changed` numbers are others than before, by `max_rel_error` at most, `sqnr_db` in all; after an
    inversion that counts from the numbers that the right scale gives.
    """

    name: str
    what: str
    before: float | None
    after: float | None
    num_elements: int
    num_changed: int
    max_rel_error: float
    sqnr_db: float


@dataclass(frozen=True, kw_only=True)
class RepairResult:
    """A checkpoint with other scales than the one it was made from; `left` is what was named and is not repaired."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "repair"
    path: str
    output: str
    layout: str
    tensors: tuple[RepairedTensor, ...]
    num_tensors: int
    left: tuple[str, ...]
    files: tuple[FileRecord, ...]

    @property
    def exact(self) -> bool:
        """Whether no number changed but by the inversion of its scale."""
        return not any(t.num_changed for t in self.tensors)


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """Files that were sent to a repository of the hub; `commit` and `url` are None where they only would be.

    `level` is that of the verification which the output passed.
    """

    schema_version: int = SCHEMA_VERSION
    kind: str = "push"
    path: str
    repo_id: str
    message: str
    commit: str | None
    url: str | None
    level: str
    files: tuple[FileRecord, ...]
