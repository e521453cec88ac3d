"""Select, sort and group tensor records, and tables of them: groups, the worst tensors, each layer and each tensor."""

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias, TypeVar

from lpconv.report.document import Cell, Row, Section, Table, section
from lpconv.report.numbers import (
    MISSING,
    count_text,
    error_text,
    format_text,
    number_text,
    plural,
    scale_text,
    shape_text,
    share_text,
    size_text,
    sqnr_text,
)
from lpconv.results import ComparedTensor, ConvertResult, RoundingRecord, TensorRecord

T = TypeVar("T", bound=TensorRecord | ComparedTensor)

_ACTIONS = ("convert", "keep", "tie")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|cls|qa_outputs)\.")
_LAYER = re.compile(r".*?\.\d+(?=\.|\Z)", re.DOTALL)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EMBEDDING = re.compile(r"emb|(^|\.)w[tp]e\.", re.IGNORECASE)
SINGLE_ELEMENTS = "The largest relative error is of a single element: 1 if it became 0, and large for values near 0."
_MOST = 1000  # most tensors and layers on a page
_FEEDBACK = "Output error, %"  # the column of error feedback
_GROUPS = 12  # most groups of tensors on a terminal

# Columns of a table of tensor records, by heading.
_Columns: TypeAlias = dict[str, Callable[[TensorRecord], str | Cell]]


def num_elements(tensor: TensorRecord) -> int:
    """Number of elements of the tensor; 1 for a 0-d tensor."""
    return math.prod(tensor.shape)


def converted_tensors(tensors: Iterable[TensorRecord]) -> tuple[TensorRecord, ...]:
    """The tensors that were converted."""
    return tuple(t for t in tensors if t.action == "convert")


def nothing_converted(formats: Collection[str], wanted: str, *, verb: str) -> str | None:
    """A warning if no tensor is converted, or none to `wanted`.

    `formats` are the formats of converted tensors, and `verb` is "was", or "would be" for a plan.
    """
    if not formats:
        return "no tensor is converted: the output is a copy"
    return None if wanted in formats else f"no tensor {verb} converted to {wanted}"


def overflow_text(t: TensorRecord) -> str:
    """Description of a tensor with finite numbers that became Inf in its format."""
    numbers = plural(t.num_saturated, "number")
    other = " (bf16 has the range)" if t.format == "fp16" and t.source_dtype != "F64" else ""
    return f"`{t.name}`: {numbers} beyond the range of {t.format} became Inf{other}"


def worst_tensors(tensors: Iterable[TensorRecord], count: int) -> tuple[TensorRecord, ...]:
    """The `count` measured tensors with the lowest SQNR, worst first, without exact ones."""
    noisy = [t for t in tensors if t.sqnr_db is not None and t.sqnr_db != math.inf]
    # NaN (no signal at all) does not compare, so it is sorted first explicitly.
    return tuple(sorted(noisy, key=lambda t: (not math.isnan(t.sqnr_db or 0), t.sqnr_db, t.name))[:count])


def lowest_sqnr(tensors: Iterable[TensorRecord]) -> float | None:
    """The lowest measured SQNR in dB, with NaN (no signal at all) below any number; None if none was measured."""
    measured = (t.sqnr_db for t in tensors if t.sqnr_db is not None)
    return min(measured, key=lambda decibels: (not math.isnan(decibels), decibels), default=None)


def action_groups(tensors: Iterable[TensorRecord]) -> tuple[tuple[TensorRecord, ...], ...]:
    """Tensors grouped by action and reason: converted, kept, tied; within each, the largest group first."""
    groups: dict[tuple[str, ...], list[TensorRecord]] = {}
    for t in tensors:
        groups.setdefault((t.action, t.source_dtype, t.format, t.reason), []).append(t)

    def order(group: tuple[TensorRecord, ...]) -> tuple[int, int, str]:
        rank = _ACTIONS.index(group[0].action) if group[0].action in _ACTIONS else len(_ACTIONS)
        return rank, -sum(t.bytes_in for t in group), group[0].reason

    return tuple(sorted(map(tuple, groups.values()), key=order))


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
    found = _LAYER.match(name)
    return found[0] if found else None


def modules_of(names: Sequence[str]) -> dict[str, str]:
    """The module that each name is grouped under.

    A tensor in a numbered layer belongs to that layer. Others belong to the parent of their module (all of a BERT's
    ``embeddings.*``), unless the parent also contains the numbered layers (a Llama's ``model.norm``).
    """
    layers = {name: prefix for name in names if (prefix := _layer_prefix(name))}
    trunks = {p for prefix in layers.values() for p in accumulate(prefix.split(".")[:-1], "{}.{}".format)}  # parents
    return {name: layers.get(name) or _outer_module(name, trunks) for name in names}


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


def output_errors(records: Iterable[RoundingRecord | None]) -> tuple[float, float] | None:
    """Mean relative squared output errors of layers (to nearest, with error feedback), or None without feedback."""
    pairs = ((r.nearest_error, r.output_error) for r in records if r is not None)
    errors = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not errors:
        return None
    before, after = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    return before, after


def is_expert(name: str) -> bool:
    """Whether a tensor holds the weight of one expert."""
    return _EXPERT.search(name) is not None


def tokens_per_expert(roundings: Mapping[str, RoundingRecord | None]) -> dict[tuple[str, int], int]:
    """Number of calibration tokens that reach each expert, by layer and index, from the records of tensors by name.

    A tensor of one expert that no token reaches has no record.
    """
    tokens: dict[tuple[str, int], int] = {}
    for name, record in roundings.items():
        layer, expert = _layer_prefix(name) or "", _EXPERT.search(name)
        counts = record.expert_inputs if record else ()
        if expert is not None:
            counts = (record.num_inputs or 0 if record else 0,)
        for index, count in enumerate(counts, int(expert[1]) if expert else 0):
            tokens[layer, index] = max(count, tokens.get((layer, index), 0))
    return tokens


def tokens_text(tokens: Mapping[tuple[str, int], int]) -> str:
    """The spread of tokens over experts: "0 to 1,204 tokens per expert, median 43"."""
    counts = tokens.values()
    least, median, most = (count_text(round(f(counts))) for f in (min, statistics.median, max))
    return f"{least} to {most} tokens per expert, median {median}"


def listed_tensors(tensors: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
    """The tensors shown on a page: of very many, the worst ones and an even sample of the others."""
    if len(tensors) <= _MOST:
        return tensors
    worst, step = {t.name for t in worst_tensors(tensors, _MOST // 2)}, -(-len(tensors) // (_MOST // 2))
    return tuple(t for i, t in enumerate(tensors) if i % step == 0 or t.name in worst)


def action_sections(tensors: Sequence[TensorRecord]) -> tuple[Section | None, ...]:
    """Actions by group of tensors, with reasons; on a page with an example of each."""
    groups = action_groups(tensors)
    if not groups:
        return (section("Tensors", "The checkpoint holds no tensors."),)
    columns = ("Action", "Tensors", "<Format", "Before", "After", "<Why")
    whole = Table(columns=(*columns, "<For example"), rows=tuple((*action_row(g), g[0].name) for g in groups))
    brief = Table(columns=columns, rows=tuple(map(action_row, groups)), most=_GROUPS)
    return section("What was done and why", whole, only="page"), section("Tensors", brief, only="terminal")


def action_row(group: Sequence[TensorRecord]) -> tuple[str, ...]:
    """A table row for a group of tensors: action, count, formats, size before and after, reason."""
    t, before, after = group[0], sum(t.bytes_in for t in group), sum(t.bytes_out for t in group)
    formats = f"{t.source_dtype} → {format_text(t.format)}" if t.action == "convert" else t.source_dtype
    return t.action, count_text(len(group)), formats, size_text(before), size_text(after), t.reason


def worst_table(tensors: Sequence[TensorRecord], count: int) -> Table:
    """The tensors with the lowest SQNR, and any causes of error besides rounding."""
    rows = tuple(
        (t.name, format_text(t.format), sqnr_text(t.sqnr_db), scale_text(t.scale), error_causes(t))
        for t in worst_tensors(tensors, count)
    )
    columns = ("Tensor", "<Format", "SQNR dB", "Scale", "<Besides rounding")
    return Table(columns=columns, rows=rows, has_names=True)


def _number(text: str, value: float | None) -> Cell:
    return Cell(text=text, sort=value)


def layer_section(tensors: Sequence[TensorRecord]) -> Section | None:
    groups = layer_groups(tensors)
    columns = ("Module", "Tensors", "Converted", "Elements", "Before", "After", "Lowest SQNR, dB")
    has_feedback = output_errors(t.rounding for t in tensors) is not None
    table = Table(
        columns=(*columns, "Saturated", "To zero", *([_FEEDBACK] if has_feedback else [])),
        rows=tuple(
            _layer_row(module, group) + ((_feedback_cell(group),) if has_feedback else ())
            for module, group in list(groups.items())[:_MOST]
        ),
        has_names=True,
        sortable=True,
    )
    of_all = f": {count_text(_MOST)} of {count_text(len(groups))}" if len(groups) > _MOST else ""
    return section(f"By layer{of_all}", table, only="page")


def _feedback_cell(tensors: Sequence[TensorRecord]) -> Cell:
    """Mean output errors to nearest and with error feedback: "0.34 → 0.14" per cent."""
    errors = output_errors(t.rounding for t in tensors)
    if errors is None:
        return _number(MISSING, None)
    return _number(" → ".join(f"{100 * e:.2g}" for e in errors), errors[1])


def _layer_row(module: str, tensors: Sequence[TensorRecord]) -> Row:
    changed = converted_tensors(tensors)
    lowest = lowest_sqnr(changed)
    counts = (len(tensors), len(changed), sum(map(num_elements, tensors)))
    sizes = (sum(t.bytes_in for t in tensors), sum(t.bytes_out for t in tensors))
    lost = (sum(t.num_saturated for t in tensors), sum(t.num_flushed for t in tensors))
    return (
        module,
        *(_number(count_text(n), n) for n in counts),
        *(_number(size_text(n), n) for n in sizes),
        _number(sqnr_text(lowest), lowest),
        *(_number(count_text(n), n) for n in lost),
    )


def tensor_section(result: ConvertResult, listed: Sequence[TensorRecord]) -> Section | None:
    """Every tensor in layer order, without empty columns."""
    columns = _tensor_columns(result, listed)
    table = Table(
        columns=tuple(columns),
        rows=tuple(tuple(cell(t) for cell in columns.values()) for t in in_layer_order(listed)),
        has_names=True,
        sortable=True,
        filter="attention kept e4m3fn",
        caption=SINGLE_ELEMENTS,
    )
    if len(listed) == len(result.tensors):
        return section("Every tensor", table, only="page")
    title = f"{count_text(len(listed))} of {count_text(len(result.tensors))} tensors"
    sample = "The worst tensors and an even sample of the others, here and in the charts; report.json lists all."
    return section(title, sample, table, only="page")


def _tensor_columns(result: ConvertResult, tensors: Sequence[TensorRecord]) -> _Columns:
    """The columns of the table of tensors, by heading. "Largest input" comes from the calibration."""
    largest = result.calibration.absmax if result.calibration else {}
    inputs = {f"{module}.weight": value for module, value in largest.items()}
    columns: _Columns = {
        "Tensor": lambda t: t.name,
        "Shape": lambda t: _number(shape_text(t.shape), num_elements(t)),
        "<Stored as": _stored_as,
        "Scale": lambda t: _number(scale_text(t.scale), t.scale),
        "RMS": lambda t: _number(number_text(t.rms), t.rms),
        "Largest": lambda t: _number(number_text(t.absmax), t.absmax),
        "Largest input": lambda t: _number(number_text(inputs.get(t.name)), inputs.get(t.name)),
        "SQNR, dB": lambda t: _number(sqnr_text(t.sqnr_db), t.sqnr_db),
        "Max rel. error": lambda t: _number(error_text(t.max_rel_error), t.max_rel_error),
        _FEEDBACK: lambda t: _feedback_cell([t]),
        "Saturated": lambda t: _number(count_text(t.num_saturated), t.num_saturated),
        "To zero": lambda t: _number(count_text(t.num_flushed), t.num_flushed),
        "NaN, Inf": lambda t: _number(count_text(t.num_nan + t.num_inf), t.num_nan + t.num_inf),
        "Size": lambda t: _number(size_text(t.bytes_out), t.bytes_out),
        "<Why": lambda t: t.reason + (f" ({t.tied_to})" if t.tied_to else ""),
    }
    is_empty = {
        "Scale": all(t.scale is None for t in tensors),
        "Largest input": not inputs,
        _FEEDBACK: output_errors(t.rounding for t in tensors) is None,
        "Saturated": not any(t.num_saturated for t in tensors),
        "To zero": not any(t.num_flushed for t in tensors),
        "NaN, Inf": not any(t.num_nan or t.num_inf for t in tensors),
    }
    return {heading: cell for heading, cell in columns.items() if not is_empty.get(heading)}


def _stored_as(t: TensorRecord) -> str:
    if t.action == "convert":
        return f"{t.source_dtype} → {format_text(t.format)}"
    return f"{t.source_dtype}, kept" if t.action == "keep" else t.action


def error_causes(t: TensorRecord) -> str:
    """Causes of error besides rounding: "3 saturated", "0.06 % to zero", "nothing"."""
    causes = []
    if t.num_nan or t.num_inf:
        causes.append(f"{count_text(t.num_nan + t.num_inf)} NaN or Inf in the source")
    if t.num_saturated:
        causes.append(f"{count_text(t.num_saturated)} saturated")
    if t.num_flushed:
        causes.append(f"{share_text(t.num_flushed, num_elements(t))} to zero")
    return ", ".join(causes) or "nothing"
