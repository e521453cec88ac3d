"""Records of stored checkpoints: files, sources, dtypes, and the result of `lpconv inspect`."""

from dataclasses import dataclass, field

from lpconv.results.documents import Result


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

    `layout` is the `quant_method` of a quantised checkpoint; `bits_per_weight` is for its quantised weights, including
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
