"""The plan of a conversion: every output tensor, file, offset and byte count, from headers alone.

A pure function of the source's headers and the options. Dry runs, the disk check, resuming and byte-deterministic
output all come from this one object.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lpconv.checkpoint.compressed import COMPRESSED_TENSORS, LinearModules
from lpconv.checkpoint.header import DTYPE_BITS, TensorInfo, encode_header
from lpconv.convert.options import ConvertOptions
from lpconv.convert.policy import decide
from lpconv.errors import UnsupportedError
from lpconv.formats.spec import Format
from lpconv.mcf.point_layout import PointLayout
from lpconv.methods import Method

__all__ = [
    "POINTS_SUFFIX",
    "RESIDUAL_FOLDER",
    "SCALE_SUFFIX",
    "OutputFile",
    "Plan",
    "PlannedShard",
    "PlannedTensor",
    "make_plan",
]

SCALE_SUFFIX = "_scale"
POINTS_SUFFIX = "_points"
RESIDUAL_FOLDER = "collage"
# dtype and bits of a residual component by its name; the forms themselves are in `lpconv.mcf`.
_RESIDUAL_DTYPES = {"bf16": "BF16", "fp16": "F16", "exact16": "I16", "int8": "I8"}


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """One source tensor and what becomes of it.

    `format` is None where it is kept; `tied_to` is the weight that it shares, where it is not stored. `points` is the
    layout of its rows where they become points, and then `format` that of the components.
    """

    info: TensorInfo
    format: Format | None
    reason: str
    tied_to: str | None = None
    points: PointLayout | None = None

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def action(self) -> str:
        return "tie" if self.tied_to else "keep" if self.format is None else "convert"


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """One file to write: `name` relative to the output directory, its header bytes, its tensors in file order."""

    name: str
    header: bytes
    tensors: tuple[TensorInfo, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + (self.tensors[-1].end if self.tensors else 0)


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """Tensors that are written together: one root file, and a residual file for pairs that have one.

    `tensors` stand in the order of their data in the files. The scales come first in the root file.
    """

    root: OutputFile
    residual: OutputFile | None
    tensors: tuple[PlannedTensor, ...]

    @property
    def scaled(self) -> tuple[PlannedTensor, ...]:
        """Tensors with a scale, in the order of the scales in the root file."""
        has_scale = {t.name for t in self.root.tensors}
        return tuple(
            sorted(
                (t for t in self.tensors if t.format and t.name + SCALE_SUFFIX in has_scale),
                key=lambda t: t.name + SCALE_SUFFIX,
            )
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that will be written. `tensors` covers every source tensor exactly once, in source order.

    `linears` are the model's `Linear` modules, where the layout needs to know them.
    """

    method: Method
    options: ConvertOptions
    tensors: tuple[PlannedTensor, ...]
    shards: tuple[PlannedShard, ...]
    linears: LinearModules | None = None

    @property
    def files(self) -> tuple[OutputFile, ...]:
        return tuple(f for s in self.shards for f in (s.root, s.residual) if f is not None)

    @property
    def bytes_in(self) -> int:
        return sum(t.info.num_bytes for t in self.tensors if t.action != "tie")

    @property
    def bytes_out(self) -> int:
        return sum(f.size_bytes for f in self.files)

    def bytes_of(self, t: PlannedTensor) -> int:
        """Bytes that a source tensor takes in the output: codes, scale and residual."""
        if t.tied_to:
            return 0
        size = sum(i.num_bytes for i in _root_infos(t, self.options, self.method))
        if self.method.encoder == "pair" and t.format is not None:
            size += t.info.num_elements * DTYPE_BITS[_RESIDUAL_DTYPES[self.options.residual or ""]] // 8
        return size

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all headers and decisions: runs that share it write the same bytes from the same source."""
        digest = hashlib.sha256()
        for f in self.files:
            digest.update(json.dumps([f.name, len(f.header)]).encode() + f.header)
        shaping = ("method", "format", "residual", "layout", "scale", "budget_bits", "points_max")
        shape = [getattr(self.options, n) for n in shaping]
        digest.update(json.dumps([shape, [(t.name, t.action, t.reason) for t in self.tensors]]).encode())
        return digest.hexdigest()


def make_plan(
    entries: Mapping[str, tuple[TensorInfo, str]],
    method: Method,
    options: ConvertOptions,
    *,
    ties: Mapping[str, str],
    metadata: Mapping[str, str],
    linears: LinearModules | None = None,
) -> Plan:
    """The plan for source tensors `entries` (name → header entry, file); `ties` maps dropped names to kept ones.
    `linears` are the model's `Linear` modules, for a layout that converts nothing else.

    Raises UnsupportedError where a scale would take the name of a tensor that the source has.
    """
    suffixes = {"scaled": (SCALE_SUFFIX,), "points": (SCALE_SUFFIX, POINTS_SUFFIX)}.get(method.encoder, ())
    taken = [n for n in entries for s in suffixes if n.endswith(s) and n.removesuffix(s) in entries]
    if taken:
        raise UnsupportedError(
            f"the source already has scales, first `{taken[0]}`", hint="convert from the unquantised checkpoint"
        )
    convertible = None if linears is None else linears.weights
    planned = {n: _planned(info, method, options, ties.get(n), convertible) for n, (info, _) in entries.items()}
    stored = [t for t in planned.values() if t.action != "tie"]
    groups = _groups(stored, {n: f for n, (_, f) in entries.items()}, options.max_shard_size, method, options)
    names = _shard_names(len(groups))
    shards = tuple(_shard(n, g, method, options, metadata) for n, g in zip(names, groups, strict=True))
    return Plan(method=method, options=options, tensors=tuple(planned.values()), shards=shards, linears=linears)


def _planned(
    info: TensorInfo,
    method: Method,
    options: ConvertOptions,
    tied_to: str | None,
    convertible: Container[str] | None,
) -> PlannedTensor:
    if tied_to is not None:
        return PlannedTensor(info=info, format=None, reason=f"tied to `{tied_to}`", tied_to=tied_to)
    decision = decide(info, options, method, convertible=convertible)
    return PlannedTensor(info=info, format=decision.format, reason=decision.reason, points=decision.points)


def _groups(
    tensors: Sequence[PlannedTensor],
    files: Mapping[str, str],
    max_bytes: int | None,
    method: Method,
    options: ConvertOptions,
) -> list[list[PlannedTensor]]:
    """Tensors by output shard: as the source's files, or filled in source order up to `max_bytes`."""
    if max_bytes is None:
        by_file: dict[str, list[PlannedTensor]] = {}
        for t in tensors:
            by_file.setdefault(files[t.name], []).append(t)
        return [by_file[f] for f in sorted(by_file)] or [[]]
    groups: list[list[PlannedTensor]] = [[]]
    filled = 0
    for t in tensors:
        size = sum(i.num_bytes for i in _root_infos(t, options, method))
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(t)
        filled += size
    return groups


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    count = 1
    for n in shape:
        count *= n
    return TensorInfo(name=name, dtype=dtype, shape=shape, begin=0, end=count * DTYPE_BITS[dtype] // 8)


def _root_infos(t: PlannedTensor, options: ConvertOptions, method: Method) -> list[TensorInfo]:
    """Entries of one tensor in the root file. Our codes have a leading axis: stock transformers must refuse them."""
    if t.format is None:
        return [_info(t.name, t.info.dtype, t.info.shape)]
    if t.points is not None:
        return [
            _info(t.name + SCALE_SUFFIX, "F32", (t.points.num_points,)),
            _info(t.name + POINTS_SUFFIX, "U8", t.info.shape[:-1]),
            _info(t.name, t.format.safetensors or "U8", (1, t.points.num_points, t.points.row_bytes)),
        ]
    dtype = t.format.safetensors
    assert dtype is not None, t.format.name
    if method.encoder == "pair":
        return [_info(t.name, dtype, t.info.shape)]
    axis = () if options.layout == COMPRESSED_TENSORS else (1,)
    return [_info(t.name + SCALE_SUFFIX, "F32", (1,)), _info(t.name, dtype, (*axis, *t.info.shape))]


def _shard(
    name: str, tensors: Sequence[PlannedTensor], method: Method, options: ConvertOptions, metadata: Mapping[str, str]
) -> PlannedShard:
    infos = [(i, t) for t in tensors for i in _root_infos(t, options, method)]
    # Widest dtype first, scales and counts before the other tensors of their width, then by name: everything is aligned
    # and a sequential hash can be taken while the codes are written.
    infos.sort(key=lambda it: (-DTYPE_BITS[it[0].dtype], it[0].name == it[1].name, it[0].name))
    ordered = tuple(t for i, t in infos if i.name == t.name)
    root = _output_file(name, [i for i, _ in infos], {"format": "pt", **metadata})
    converted = [t for t in ordered if t.format is not None]
    residual = None
    if method.encoder == "pair" and converted:
        dtype = _RESIDUAL_DTYPES[options.residual or ""]
        lows = [_info(t.name, dtype, t.info.shape) for t in converted]
        residual = _output_file(
            f"{RESIDUAL_FOLDER}/{name.replace('model', 'residual', 1)}",
            lows,
            {"format": "lpconv-residual", "residual": options.residual or "", **metadata},
        )
    return PlannedShard(root=root, residual=residual, tensors=ordered)


def _output_file(name: str, infos: Iterable[TensorInfo], metadata: Mapping[str, str]) -> OutputFile:
    position, placed = 0, []
    for i in infos:
        end = position + i.num_bytes
        placed.append(TensorInfo(name=i.name, dtype=i.dtype, shape=i.shape, begin=position, end=end))
        position = end
    return OutputFile(name=name, header=encode_header(placed, metadata), tensors=tuple(placed))
