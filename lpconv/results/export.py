"""Records of `lpconv export`."""

from dataclasses import dataclass, field

from lpconv.results.checkpoint import FileRecord, SourceRecord
from lpconv.results.documents import Result


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
