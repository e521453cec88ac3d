"""What `lpconv export` did."""

from dataclasses import dataclass, field

from lpconv.results.checkpoint import FileRecord, SourceRecord
from lpconv.results.documents import Result


@dataclass(frozen=True, kw_only=True)
class FormatCount:
    """Number of weights of an ONNX graph that are stored in one form, such as ``e4m3fn × scale`` or ``bf16 + bf16``.

    Tensors whose elements are equal lie in the file once, and count once.
    """

    form: str
    num_tensors: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class OnnxCheck:
    """Comparison of the ONNX file in ONNX Runtime with the model in PyTorch, on the same inputs, both in fp32.

    `max_abs_diff` is over all outputs of all `cases` (input shapes in words), `max_rel_diff` is that of a case over its
    largest output; both are infinite where one side is NaN or Inf and the other is not.
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

    `weights` counts the graph's parameters by the form they are stored in. `check` is None where it was not asked for.
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
