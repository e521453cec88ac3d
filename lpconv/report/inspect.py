"""The document of an inspection: the verdict, the checks behind it, and the contents of the checkpoint."""

import math
from collections.abc import Callable, Sequence

from lpconv.report.convert import files_section
from lpconv.report.document import Document, Table, Verdict, section, sections_of
from lpconv.report.numbers import count_text, format_text, number_text, plural, scale_text, shape_text, size_text
from lpconv.results import InspectResult, StoredTensor

_SHOWN = 5  # most notes without --all


def inspect_document(record: InspectResult, *, every: bool = False) -> Document:
    """The verdict and the checks behind it first; `every` lists all tensors and notes."""
    most = None if every else _SHOWN
    ties = [f"{name} → {weight}" for name, weight in record.ties.items()]
    dtypes = (
        (d.dtype, count_text(d.num_tensors), count_text(d.num_elements), size_text(d.size_bytes)) for d in record.dtypes
    )
    dtype_table = Table(columns=("Dtype", "Tensors", "Elements", "Size"), rows=tuple(dtypes))
    hint = f"{plural(len(record.tensors), 'tensor')}; list them with --all"
    return Document(
        kind="inspection",
        title=record.path,
        verdict=_verdict(record),
        facts=_facts(record),
        sections=sections_of(
            section("Problems", _first_notes(record.problems, most), outcome="failed"),
            section("Warnings", _first_notes(record.warnings, most)),
            section("Dtypes", dtype_table),
            files_section(record.shards),
            section("Tied", _first_notes(ties, most)),
            section("Tensors", _stored_table(record.tensors) if every else hint),
        ),
    )


def _verdict(record: InspectResult) -> Verdict:
    """The verdict in a few words, including any scales that were not checked."""
    warned = plural(len(record.warnings), "warning")
    if record.not_judged and not record.problems:
        return Verdict(outcome="not run", text=f"Not judged: {record.not_judged}")
    rest = "".join(f"; not judged: {what}" for what in record.not_checked if "scales" in what)
    if record.problems:
        problems = plural(len(record.problems), "problem")
        return Verdict(outcome="failed", text=(f"{problems}, {warned}" if record.warnings else problems) + rest)
    if record.warnings:
        return Verdict(outcome="not run", text=f"No problem, {warned}{rest}")
    return Verdict(outcome="passed", text=f"No problem found{rest}")


def _facts(record: InspectResult) -> dict[str, str]:
    checks = {"Checked": ", ".join(record.checked), "Not checked": ", ".join(record.not_checked)}
    origin = f"quantised in the layout of {record.layout}" if record.layout else "an ordinary checkpoint"
    is_own = record.method and record.layout in (None, "lpconv")
    origin = f"lpconv, method {record.method}" if is_own else origin
    tensors_bytes, files_bytes = (sum(x.size_bytes for x in sizes) for sizes in (record.dtypes, record.shards))
    packed = f", packed in {size_text(files_bytes)}" if files_bytes < tensors_bytes else ""
    facts = {label: what for label, what in checks.items() if what} | {
        "Kind": origin + (f", {format_text(record.format)}" if record.format else ""),
        "Architecture": record.architecture or "not named in config.json",
        "Parameters": count_text(sum(math.prod(t.shape) for t in record.tensors)),
        "Size": size_text(tensors_bytes) + packed,
    }
    if record.bits_per_weight is not None:
        facts["Bits"] = f"{record.bits_per_weight:.2f} per quantised weight, including scales"
    return facts


def _first_notes(notes: Sequence[str], most: int | None) -> tuple[str, ...]:
    if most is None or len(notes) <= most:
        return tuple(notes)
    return (*notes[:most], f"and {len(notes) - most} more (--all)")


def _stored_table(tensors: Sequence[StoredTensor]) -> Table:
    shown = {heading: cell for heading, cell in _STORED_COLUMNS.items() if any(map(cell, tensors))}
    rows = tuple((t.name, *(cell(t) for cell in shown.values())) for t in tensors)
    return Table(columns=("Tensor", *shown), rows=rows, has_names=True)


# Columns after the name; columns with only empty cells are left out.
_STORED_COLUMNS: dict[str, Callable[[StoredTensor], str]] = {
    "<Dtype": lambda t: t.dtype,
    "Shape": lambda t: shape_text(t.shape),
    "Size": lambda t: size_text(t.size_bytes),
    "<Numbers": lambda t: t.stored_as or "",
    "Scale": lambda t: scale_text(t.scale) if t.scale is not None else "",
    "RMS": lambda t: number_text(t.rms) if t.rms is not None else "",
    "Largest": lambda t: number_text(t.absmax) if t.absmax is not None else "",
    "NaN": lambda t: count_text(t.num_nan) if t.num_nan else "",
    "Inf": lambda t: count_text(t.num_inf) if t.num_inf else "",
}
