"""Select, sort and group tensor records for reports."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from lpconv.report.numbers import plural
from lpconv.results import ComparedTensor, ConvertResult, RoundingRecord, TensorRecord

T = TypeVar("T", bound=TensorRecord | ComparedTensor)

_ACTIONS = ("convert", "keep", "tie")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|cls|qa_outputs)\.")
_EMBEDDING = re.compile(r"emb|(^|\.)w[tp]e\.", re.IGNORECASE)


def num_elements(tensor: TensorRecord) -> int:
    """Number of elements of the tensor; 1 for a 0-d tensor."""
    return math.prod(tensor.shape)


def converted_tensors(tensors: Iterable[TensorRecord]) -> tuple[TensorRecord, ...]:
    """The tensors that were converted."""
    return tuple(t for t in tensors if t.action == "convert")


def nothing_converted(formats: Collection[str], wanted: str) -> str | None:
    """What to say if no tensor is converted, or none to the format `wanted`; `formats` are those of converted ones."""
    if not formats:
        return "no tensor is converted: the output is a copy"
    return None if wanted in formats else f"no tensor was converted to {wanted}"


def overflow_text(t: TensorRecord) -> str:
    """What to say of a tensor whose finite numbers became Inf in its format."""
    numbers = plural(t.num_saturated, "number")
    return f"`{t.name}`: {numbers} beyond the range of {t.format} became Inf (bf16 has the range)"


def worst_tensors(tensors: Iterable[TensorRecord], count: int) -> tuple[TensorRecord, ...]:
    """The `count` measured tensors with the lowest SQNR, worst first, without exact ones."""
    noisy = [t for t in tensors if t.sqnr_db is not None and t.sqnr_db != math.inf]
    # NaN (no signal at all) does not compare, so it is sorted first explicitly.
    return tuple(sorted(noisy, key=lambda t: (not math.isnan(t.sqnr_db or 0), t.sqnr_db, t.name))[:count])


def action_groups(tensors: Iterable[TensorRecord]) -> tuple[tuple[TensorRecord, ...], ...]:
    """Tensors grouped by action and reason: converted, kept, tied; within each, the largest group first."""
    groups: dict[tuple[str, ...], list[TensorRecord]] = {}
    for t in tensors:
        groups.setdefault((t.action, t.source_dtype, t.format, t.reason), []).append(t)

    def order(group: tuple[TensorRecord, ...]) -> tuple[int, int, str]:
        return _rank(group[0].action), -sum(t.bytes_in for t in group), group[0].reason

    return tuple(sorted(map(tuple, groups.values()), key=order))


def _rank(action: str) -> int:
    return _ACTIONS.index(action) if action in _ACTIONS else len(_ACTIONS)


def in_layer_order(tensors: Iterable[T]) -> tuple[T, ...]:
    """Tensors in approximate data-flow order: embeddings, numbered layers, the rest, output heads."""
    return tuple(sorted(tensors, key=lambda t: (_stage(t.name), _natural_key(t.name))))


def _stage(name: str) -> int:
    if _layer_prefix(name):
        return 1
    if _HEAD.search(name):
        return 3
    return 0 if _EMBEDDING.search(name) else 2


def _natural_key(name: str) -> list[tuple[int, str]]:
    """A sort key that orders 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _layer_prefix(name: str) -> str | None:
    """The name up to its first number: ``encoder.layer.3`` for ``encoder.layer.3.attention.self.query.weight``."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal() and i > 0:
            return ".".join(parts[: i + 1])
    return None


def modules_of(names: Sequence[str]) -> dict[str, str]:
    """The module that each name is grouped under.

    A tensor in a numbered layer belongs to that layer. Others belong to the parent of their module (all of a BERT's
    ``embeddings.*``), unless the parent also contains the numbered layers (a Llama's ``model.norm``).
    """
    layers = {name: prefix for name in names if (prefix := _layer_prefix(name))}
    trunks = {parent for prefix in layers.values() for parent in _parents(prefix)}
    return {name: layers.get(name) or _outer_module(name, trunks) for name in names}


def _parents(prefix: str) -> list[str]:
    parts = prefix.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _outer_module(name: str, trunks: set[str]) -> str:
    module = name.rpartition(".")[0]
    outer = module.rpartition(".")[0]
    if not outer or outer in trunks:
        return module or name
    return outer


def layer_groups(tensors: Iterable[TensorRecord]) -> dict[str, list[TensorRecord]]:
    """The tensors of each module, in layer order."""
    ordered = in_layer_order(tensors)
    modules = modules_of([t.name for t in ordered])
    groups: dict[str, list[TensorRecord]] = {}
    for t in ordered:
        groups.setdefault(modules[t.name], []).append(t)
    return groups


def has_finer_scales(result: ConvertResult) -> bool:
    """Whether scales are finer than one per tensor."""
    return bool(result.options.get("granularity", "tensor") != "tensor")


def output_errors(records: Iterable[RoundingRecord | None]) -> tuple[float, float] | None:
    """Mean relative squared output errors of layers (to nearest, with error feedback), or None without feedback."""
    pairs = ((r.nearest_error, r.output_error) for r in records if r is not None)
    errors = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not errors:
        return None
    before, after = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    return before, after
