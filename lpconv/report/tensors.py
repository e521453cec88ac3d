"""Tensor records selected, ordered and grouped the way a reader looks for them."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lpconv.results import ComparedTensor, ConvertResult, TensorRecord

T = TypeVar("T", bound=TensorRecord | ComparedTensor)

_ACTIONS = ("convert", "keep", "tie")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|cls|qa_outputs)\.")
_EMBEDDING = re.compile(r"emb|(^|\.)w[tp]e\.", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class DoneGroup:
    """Tensors that met the same fate for the same reason."""

    action: str
    source_dtype: str
    format: str
    reason: str
    num_tensors: int
    bytes_in: int
    bytes_out: int
    example: str


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """The tensors of one module of the model. `worst` has the smallest SQNR of them, None where none was measured."""

    module: str
    num_tensors: int
    num_converted: int
    num_elements: int
    bytes_in: int
    bytes_out: int
    worst: TensorRecord | None
    max_rel_error: float | None
    num_saturated: int
    num_flushed: int


def num_elements(tensor: TensorRecord) -> int:
    """Elements of the tensor; 1 for a 0-d tensor."""
    return math.prod(tensor.shape)


def converted(tensors: Iterable[TensorRecord]) -> tuple[TensorRecord, ...]:
    """The tensors whose stored form changed."""
    return tuple(t for t in tensors if t.action == "convert")


def worst_tensors(tensors: Iterable[TensorRecord], count: int) -> tuple[TensorRecord, ...]:
    """The `count` measured tensors with the smallest SQNR, worst first; exact ones are not among them."""
    noisy = [t for t in tensors if t.sqnr_db is not None and t.sqnr_db != math.inf]
    # NaN (no signal at all) compares with nothing, so it is put first by hand.
    return tuple(sorted(noisy, key=lambda t: (not math.isnan(t.sqnr_db or 0), t.sqnr_db, t.name))[:count])


def done_groups(tensors: Iterable[TensorRecord]) -> tuple[DoneGroup, ...]:
    """What was done and why: converted tensors first, then kept, then tied; the largest group first in each."""
    groups: dict[tuple[str, ...], list[TensorRecord]] = {}
    for t in tensors:
        groups.setdefault((t.action, t.source_dtype, t.format, t.reason), []).append(t)
    done = [
        DoneGroup(
            action=action,
            source_dtype=dtype,
            format=fmt,
            reason=reason,
            num_tensors=len(members),
            bytes_in=sum(t.bytes_in for t in members),
            bytes_out=sum(t.bytes_out for t in members),
            example=members[0].name,
        )
        for (action, dtype, fmt, reason), members in groups.items()
    ]
    return tuple(sorted(done, key=lambda g: (_rank(g.action), -g.bytes_in, g.reason)))


def _rank(action: str) -> int:
    return _ACTIONS.index(action) if action in _ACTIONS else len(_ACTIONS)


def in_layer_order(tensors: Iterable[T]) -> tuple[T, ...]:
    """Embeddings, numbered layers by number, the rest, output heads: about the order in which data meets them."""
    return tuple(sorted(tensors, key=lambda t: (_stage(t.name), _natural(t.name))))


def _stage(name: str) -> int:
    if _layer_prefix(name):
        return 1
    if _HEAD.search(name):
        return 3
    return 0 if _EMBEDDING.search(name) else 2


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key with 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _layer_prefix(name: str) -> str | None:
    """``encoder.layer.3`` of ``encoder.layer.3.attention.self.query.weight``: all up to the first number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal() and i > 0:
            return ".".join(parts[: i + 1])
    return None


def modules_of(names: Sequence[str]) -> dict[str, str]:
    """The module that each name is grouped under.

    A tensor in a numbered layer belongs to that layer. Others go to the module that holds theirs (all of a BERT's
    ``embeddings.*``), unless that one is the trunk which holds the numbered layers too (a Llama's ``model.norm``).
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


def layer_groups(tensors: Iterable[TensorRecord]) -> tuple[LayerGroup, ...]:
    """The tensors grouped by module, in layer order."""
    ordered = in_layer_order(tensors)
    modules = modules_of([t.name for t in ordered])
    groups: dict[str, list[TensorRecord]] = {}
    for t in ordered:
        groups.setdefault(modules[t.name], []).append(t)
    return tuple(_layer_group(module, members) for module, members in groups.items())


def _layer_group(module: str, members: list[TensorRecord]) -> LayerGroup:
    changed = converted(members)
    measured = [t for t in changed if t.sqnr_db is not None]
    errors = [t.max_rel_error for t in changed if t.max_rel_error is not None]
    return LayerGroup(
        module=module,
        num_tensors=len(members),
        num_converted=len(changed),
        num_elements=sum(num_elements(t) for t in members),
        bytes_in=sum(t.bytes_in for t in members),
        bytes_out=sum(t.bytes_out for t in members),
        worst=next(iter(worst_tensors(changed, 1) or measured), None),
        max_rel_error=max(errors, default=None),
        num_saturated=sum(t.num_saturated for t in members),
        num_flushed=sum(t.num_flushed for t in members),
    )


def has_finer_scales(result: ConvertResult) -> bool:
    """Whether less than a tensor has a scale of its own."""
    return bool(result.options.get("granularity", "tensor") != "tensor")
