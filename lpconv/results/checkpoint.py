"""What is on the disk: files, sources, dtypes, and what `lpconv inspect` found."""

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
    """Origin of the weights. `name` is what the user typed, `resolved` the hub id or directory it stands for."""

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

    `stored_as` says in words what its numbers are, where it is not kept as it was. Statistics are of codes without
    their scales in checkpoints of ours, of the decoded weights in those of others, where `saturated_share` is that of
    the codes which are the largest that there are.
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

    `layout` is the `quant_method` of a quantised checkpoint; `bits_per_weight` are those of its quantised weights,
    scales included. `ties` maps the name of a tensor that is not stored to the weight it shares. `problems` says in
    words what is wrong, `warnings` what is odd. They cover what `checked` lists and nothing of `not_checked`;
    `not_judged` says why whole weights are beyond us, and None that they are not.
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
