"""The plan of a conversion: every output tensor, file, offset and byte count, from headers alone.

It is a pure function of the source's headers and the options. Dry runs, the disk check, resuming and byte-deterministic
output all use this object.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.spec import Format
from lpconv.forms import Component, Form, Kept
from lpconv.forms.facts import ConvertedFacts
from lpconv.gguf.arranged import TRANSPOSED, arranged
from lpconv.layouts import LAYOUTS
from lpconv.layouts.compressed_config import cache_scale_name
from lpconv.layouts.linears import LinearModules, format_groups, fused_groups, group_pattern
from lpconv.plan.options import FilledOptions, check_matches
from lpconv.plan.policy import check_stacks, decide, deciding_rule, form_type
from lpconv.plan.settings import shaping_options
from lpconv.plan.suited import largest_group
from lpconv.storage.checkpoint import RESIDUAL_FOLDER
from lpconv.storage.header import DTYPE_BITS, Header, TensorInfo, encode_header, lay_out
from lpconv.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

MISFIT = "whose sizes do not fit"  # end of the reason of weights that stay wide with another part of their group


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """One source tensor and its form in the output. `tied_to` is the weight that it shares, if it is not stored itself.

    `fused` are the weights that readers fuse with it into one matrix, if its form shares a scale with them. With
    `is_transposed`, the file has columns of the source's matrix or matrices as rows.
    """

    info: TensorInfo
    form: Form
    reason: str
    tied_to: str | None = None
    fused: tuple["PlannedTensor", ...] = ()
    is_transposed: bool = False

    @classmethod
    def tied(cls, info: TensorInfo, to: str) -> Self:
        """A tensor that is not stored, because it shares the weight `to`."""
        return cls(info=info, form=Kept.unchanged(info), reason=f"tied to `{to}`", tied_to=to)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def module(self) -> str:
        """Name of the module that owns the weight."""
        return self.name.rpartition(".")[0]

    @property
    def format(self) -> Format | None:
        """The number format of the output; None if the tensor is kept."""
        return self.form.format

    @property
    def action(self) -> str:
        return "tie" if self.tied_to else "keep" if self.format is None else "convert"

    @property
    def can_be_rounded(self) -> bool:
        """Whether it gets codes of at most 8 bits and may be the weight of a linear layer, as error feedback needs."""
        return (
            self.action == "convert"
            and self.form.takes_codes
            and self.form.format is not None
            and self.form.format.is_narrow
            and len(self.info.shape) in (2, 3)  # one matrix, or one for each expert
            and not self.is_transposed
        )

    @property
    def bytes_out(self) -> int:
        """Bytes in the output: codes, scale and residual."""
        return 0 if self.tied_to else self.form.num_bytes

    @property
    def root(self) -> tuple[Component, ...]:
        """The components that are stored in the root file."""
        return tuple(c for c in self.form.components if not c.in_residual)

    @property
    def bytes_read(self) -> int:
        """Source bytes that encoding reads.

        Twice the tensor if a scale has to be known first, plus once the tensors that share the scale, unless the first
        pass keeps their statistics.
        """
        shared = () if self.form.late_side else self.fused
        return self.info.num_bytes * self.form.num_readings + sum(t.info.num_bytes for t in shared)


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """One file to write: name relative to the output directory, header bytes, and tensors in file order.

    Each tensor is followed by zeros up to a multiple of `alignment`.
    """

    name: str
    header: bytes
    tensors: tuple[TensorInfo, ...]
    alignment: int = 1

    @property
    def size_bytes(self) -> int:
        return len(self.header) + (self._aligned(self.tensors[-1].end) if self.tensors else 0)

    @property
    def gaps(self) -> dict[str, int]:
        """Number of zeros after each tensor that has some."""
        gaps = {t.name: self._aligned(t.end) - t.end for t in self.tensors}
        return {name: gap for name, gap in gaps.items() if gap}

    def _aligned(self, position: int) -> int:
        return -(-position // self.alignment) * self.alignment


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """Tensors that are written together: one root file, and a residual file for pairs that have one.

    `tensors` are in the order of their data in the files. Side tensors come first in the root file, or right after the
    data that they are computed from.
    """

    root: OutputFile
    residual: OutputFile | None
    tensors: tuple[PlannedTensor, ...]

    @property
    def files(self) -> tuple[OutputFile, ...]:
        return (self.root,) if self.residual is None else (self.root, self.residual)

    @property
    def bytes_read(self) -> int:
        """Source bytes that encoding reads."""
        return sum(t.bytes_read for t in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that will be written. `tensors` has every source tensor exactly once, in source order.

    `linears` are the model's `Linear` modules, if the layout needs them. `orders` names the order of elements in
    tensors that are not stored in the source's (`gguf/arranged.py`). A subclass plans files of another format.
    """

    options: FilledOptions
    tensors: tuple[PlannedTensor, ...]
    shards: tuple[PlannedShard, ...]
    linears: LinearModules | None = None
    orders: Mapping[str, str] = field(default_factory=dict)

    @property
    def format_name(self) -> str:
        """The format of tensors without a rule, filled in by `fill_options`."""
        assert self.options.format is not None
        return self.options.format

    @property
    def files(self) -> tuple[OutputFile, ...]:
        return tuple(f for s in self.shards for f in s.files)

    @property
    def bytes_in(self) -> int:
        return sum(t.info.num_bytes for t in self.tensors if t.action != "tie")

    @property
    def bytes_out(self) -> int:
        return sum(f.size_bytes for f in self.files)

    @property
    def num_weights(self) -> int:
        """Numbers in all tensors, tied ones counted once."""
        return sum(t.info.num_elements for t in self.tensors if t.action != "tie")

    @property
    def num_calibrated(self) -> int:
        """Number of scales of inputs, keys and values that come from the calibration text."""
        return sum(t.form.has_input_scale for t in self.tensors) + len(self.cache_scales)

    @property
    def cache_scales(self) -> tuple[str, ...]:
        """Names of the scales of keys and values that come from the calibration text."""
        names = (t.form.cache_scale for t in self.tensors if self.options.measures_cache)
        return tuple(name for name in names if name is not None)

    def with_inputs(self, absmax: Mapping[str, float]) -> "Plan":
        """The plan with the largest calibrated inputs by module, and keys and values by the name of their scale."""
        return self.with_forms(lambda t: t.form.with_activations(absmax))

    def with_forms(self, form_of: Callable[[PlannedTensor], Form]) -> "Plan":
        """The plan with other forms that store the same components."""

        def with_form(t: PlannedTensor) -> PlannedTensor:
            return replace(t, form=form_of(t))

        shards = tuple(replace(s, tensors=tuple(map(with_form, s.tensors))) for s in self.shards)
        return replace(self, tensors=tuple(map(with_form, self.tensors)), shards=shards)

    def with_tensors(self, tensors: Sequence[PlannedTensor]) -> Self:
        """The plan with other decisions about tensors, for a comparison with the files of an output."""
        return replace(self, tensors=tuple(tensors))

    @property
    def form(self) -> type[Form]:
        """The form of converted tensors, or the form that selects another one."""
        return form_type(self.options)

    def in_source_order(self, name: str, x: "Tensor") -> "Tensor":
        """A whole tensor of the files, with its elements in the order of the source."""
        return arranged(x, self.orders[name], back=True) if name in self.orders else x

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about what the files cannot hold."""
        return ()

    def config_entries(self, converted: ConvertedFacts) -> dict[str, Any]:
        """Entries to add to config.json, so that readers recognise the output."""
        return self.form.config_entries(converted)

    def header_problems(self, directory: Path, headers: Mapping[str, Header]) -> list[str]:
        """Differences of the weight files' headers from what readers need, as sentences."""
        if {h.metadata.get("format") for h in headers.values()} == {"pt"}:
            return []
        return ["the metadata of the weight files do not say that they are for PyTorch"]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all headers and decisions.

        Runs with the same fingerprint write the same bytes from the same source.
        """
        digest = hashlib.sha256()
        for f in self.files:
            digest.update(json.dumps([f.name, len(f.header)]).encode() + f.header)
        digest.update(
            json.dumps([shaping_options(self.options), [(t.name, t.action, t.reason) for t in self.tensors]]).encode()
        )
        return digest.hexdigest()


def make_plan(
    entries: Mapping[str, tuple[TensorInfo, str]],
    options: FilledOptions,
    *,
    ties: Mapping[str, str],
    linears: LinearModules | None = None,
) -> Plan:
    """The plan for source tensors `entries` (name → header entry, file); `ties` maps dropped names to kept ones.

    `linears` are the model's `Linear` modules, for a layout that converts only those.

    Raises UnsupportedError if a scale would have the name of a source tensor, or if no reader could open the output;
    UsageError for a pattern that matches no tensor, or gives several formats to weights that readers fuse.
    """
    suffixes = form_type(options).suffixes
    owners = {*entries, *(n.removesuffix(".weight") for n in entries)}
    taken = [n for n in entries for s in suffixes if n.endswith(s) and n.removesuffix(s) in owners]
    _check_free_names(taken)
    for pattern in options.patterns:
        check_matches(pattern, entries)
    if linears is not None:
        check_stacks({n: info for n, (info, _) in entries.items()}, options, linears.fused)
    planned = {n: _plan_tensor(info, options, ties.get(n), linears) for n, (info, _) in entries.items()}
    if linears is not None:
        planned |= {t.name: t for t in _keep_groups_whole(planned, linears, options)}
        _check_readable(planned, linears, options)
    _check_free_names([c.name for t in planned.values() for c in t.form.side if c.name in entries])
    planned |= {t.name: t for t in _link_fused(planned)}
    stored = [t for t in planned.values() if t.action != "tie"]
    groups = _group_by_shard(stored, {n: f for n, (_, f) in entries.items()}, options.max_shard_size)
    names = shard_names(len(groups))
    shards = tuple(_plan_shard(n, g, options) for n, g in zip(names, groups, strict=True))
    orders = {t.name: TRANSPOSED for t in stored if t.is_transposed}
    return Plan(options=options, tensors=tuple(planned.values()), shards=shards, linears=linears, orders=orders)


def _check_free_names(taken: Sequence[str]) -> None:
    if taken:
        raise UnsupportedError(
            f"the source already has scales: the first is `{taken[0]}`", hint="convert from the unquantised checkpoint"
        )


def _plan_tensor(
    info: TensorInfo, options: FilledOptions, tied_to: str | None, linears: LinearModules | None
) -> PlannedTensor:
    if tied_to is not None:
        return PlannedTensor.tied(info, tied_to)
    form, reason = decide(info, options, linears=linears)
    return PlannedTensor(info=info, form=form, reason=reason, is_transposed=form.of_stacks)


def _keep_groups_whole(
    planned: Mapping[str, PlannedTensor], linears: LinearModules, options: FilledOptions
) -> Iterator[PlannedTensor]:
    """The tensors that stay wide, because shapes keep a part of their group wide and readers fuse the group.

    Raises UsageError if the options' patterns give the parts of a group different formats.
    """
    readers = "" if options.allow_mixed_groups else LAYOUTS[options.layout].fused_by
    weights = [n for n in planned if n in linears.weights and n not in linears.experts]
    groups = ([planned[n] for n in names] for names in (format_groups(weights) if readers else ()))
    mixed = [group for group in groups if len({t.format for t in group}) > 1]
    chosen = [group for group in mixed if any(options.decides(t.name) for t in group)]
    if chosen:
        stored = (f"{t.module.rpartition('.')[2]} ({t.format.name if t.format else 'kept'})" for t in chosen[0])
        pattern = group_pattern([t.name for t in chosen[0]])
        if len(chosen) > 1:
            pattern = re.sub(r"\.\d+\.", r".\\d+.", pattern)
        raise UsageError(
            f"`{chosen[0][0].module.rpartition('.')[0]}`: {readers} fuse {', '.join(stored)}, so these need one format",
            hint=f"'{pattern}' matches all; --allow-mixed-groups is for other readers",
        )
    for group in mixed:
        part = next(t for t in group if t.format is None).module.rpartition(".")[2]
        reason = f"{readers} fuse it with `{part}`, {MISFIT}"
        yield from (replace(t, form=Kept.unchanged(t.info), reason=reason) for t in group if t.format is not None)


def _check_readable(planned: Mapping[str, PlannedTensor], linears: LinearModules, options: FilledOptions) -> None:
    """Raise UnsupportedError unless some weight is converted, and all experts of a layer have the same format."""
    if all(t.format is None for t in planned.values()):
        reasons = Counter(t.reason for t in planned.values() if len(t.info.shape) > 1).most_common(2)
        group = largest_group(t.info.shape[-1] for t in planned.values() if "not a multiple of" in t.reason)
        is_finer = options.granularity.startswith("group:") and group < int(options.granularity.removeprefix("group:"))
        raise UnsupportedError(
            f"no tensor would be converted: {', '.join(f'{reason} ({n})' for reason, n in reasons) or 'no matrix'}",
            hint=f"add --granularity group:{group}" if is_finer else "use --layout lpconv, without --scheme",
        )
    if options.kv_cache is not None:
        _check_cache(planned)
    for rule in options.rules:
        ruled = [t for n, t in planned.items() if len(t.info.shape) > 1 and deciding_rule(n, options) == rule]
        if rule.format != "keep" and ruled and all(t.module in linears.tables and t.format is None for t in ruled):
            raise UnsupportedError(
                f"--rule '{rule}' converts nothing: `{ruled[0].name}`: {ruled[0].reason}",
                hint="the layouts lpconv, mlx and gguf convert embeddings",
            )
    formats: dict[str, set[Format | None]] = {}
    for name, module in {**linears.experts, **dict.fromkeys(sorted(linears.fused), "")}.items():
        formats.setdefault(module, set()).add(planned[name].format)
        why = "--calibrate cannot measure the inputs of experts" if planned[name].form.has_input_scale else None
        if len(formats[module]) > 1:
            why = "all experts of a layer must have the same format"
        if why is not None:
            raise UnsupportedError(
                f"`{name}`: {why}",
                hint="leave them out with --exclude '*.experts.*', or use a --granularity that fits, without --scheme",
            )


def _check_cache(planned: Mapping[str, PlannedTensor]) -> None:
    """Raise UnsupportedError unless all projections of keys and values are found and converted."""
    projections = [t for n, t in planned.items() if cache_scale_name(n) is not None]
    if not projections:
        raise UnsupportedError(
            "the model has no weights `k_proj` and `v_proj`, next to which the scales of keys and values belong",
            hint="leave --kv-cache out",
        )
    missing = next((t for t in projections if t.form.cache_scale is None), None)
    if missing is not None:
        raise UnsupportedError(
            f"`{missing.info.name}` is not converted ({missing.reason}), so its scale of keys or values has no place",
            hint="convert all `k_proj` and `v_proj`, or leave --kv-cache out",
        )


def _link_fused(planned: Mapping[str, PlannedTensor]) -> Iterator[PlannedTensor]:
    """The tensors that share a scale, each with the others in `fused`."""
    sharing = {n: t for n, t in planned.items() if t.action == "convert" and t.form.shares_scale}
    for _, names in fused_groups(sharing):
        for name in names:
            yield replace(sharing[name], fused=tuple(sharing[n] for n in names if n != name))


def _group_by_shard(
    tensors: Sequence[PlannedTensor], files: Mapping[str, str], max_bytes: int | None
) -> list[list[PlannedTensor]]:
    """Tensors grouped by output shard: by source file, or filled in source order up to `max_bytes`."""
    if max_bytes is None:
        by_file: dict[str, list[PlannedTensor]] = {}
        for t in tensors:
            by_file.setdefault(files[t.name], []).append(t)
        return [by_file[f] for f in sorted(by_file)] or [[]]
    groups: list[list[PlannedTensor]] = [[]]
    filled = 0
    for t in tensors:
        size = sum(c.num_bytes for c in t.root)
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(t)
        filled += size
    return groups


def shard_names(count: int) -> list[str]:
    """Names of `count` weight files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _plan_shard(name: str, tensors: Sequence[PlannedTensor], options: FilledOptions) -> PlannedShard:
    metadata = {"lpconv": __version__, "method": options.method}
    stored = [(c, t) for t in tensors for c in t.root]
    stored.sort(key=lambda it: (*_sort_key(*it), it[0].name))
    ordered = tuple(t for c, t in stored if c in t.form.data)
    root = _output_file(name, [c for c, _ in stored], {"format": "pt", **metadata})
    residual = None
    lows = [c for t in ordered for c in t.form.components if c.in_residual]
    if lows:
        residual = _output_file(
            f"{RESIDUAL_FOLDER}/{name.replace('model', 'residual', 1)}",
            lows,
            {"format": "lpconv-residual", "residual": str(options.residual), **metadata},
        )
    return PlannedShard(root=root, residual=residual, tensors=ordered)


def _sort_key(component: Component, tensor: PlannedTensor) -> tuple[int, int]:
    """Sort key of a component within a file; ties are broken by name.

    The widest dtype comes first, and scales and counts before other tensors of the same width. Side tensors that depend
    on the data come right after it, at the wider of the two widths. So everything is aligned, and the file can be
    hashed sequentially while the codes are written.
    """
    late, is_data = tensor.form.late_side, component in tensor.form.data
    if component in late or (late and is_data):
        return -max(DTYPE_BITS[c.dtype] for c in (component, *late)), 2 if is_data else 3
    return -DTYPE_BITS[component.dtype], int(is_data)


def _output_file(name: str, stored: Iterable[Component], metadata: Mapping[str, str]) -> OutputFile:
    infos = lay_out((c.name, c.dtype, c.shape) for c in stored)
    return OutputFile(name=name, header=encode_header(infos, metadata), tensors=infos)
