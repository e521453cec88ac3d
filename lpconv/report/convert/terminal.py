"""What was converted, planned, verified, compared and inspected, on the terminal: in 80 columns or what there is, and
with no meaning in colour alone.

Import this module lazily: it loads rich.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lpconv.report.compare import run_names
from lpconv.report.convert.compare import figures
from lpconv.report.convert.words import (
    DONE_COLUMNS,
    WORST_COLUMNS,
    besides_rounding,
    done_row,
    done_words,
    inputs_sentence,
    method_name,
    worst_row,
)
from lpconv.report.numbers import (
    change_text,
    count_text,
    duration_text,
    number_text,
    plural,
    rate_text,
    scale_text,
    shape_text,
    share_text,
    size_text,
)
from lpconv.report.printable import printable_record
from lpconv.report.tensors import done_groups, worst_tensors
from lpconv.report.terminal import Name, SideBySide, after_gap, facts_grid, heading, note_list, section, table_of
from lpconv.report.verify import checks, outcome_of
from lpconv.results import (
    ConvertResult,
    FileRecord,
    InspectResult,
    PartResult,
    PlanResult,
    StoredTensor,
    TensorRecord,
    VerifyResult,
)

_WORST, _GROUPS, _SHARDS, _SHOWN = 10, 12, 8, 5  # that are shown: tensors, groups of tensors, files, notes
_STYLES = {"passed": "bold green", "failed": "bold red", "not run": "yellow"}


def render_convert(result: ConvertResult) -> RenderableType:
    """What was done, what it saved, what it cost in accuracy, and how it was checked."""
    result = printable_record(result)
    read, written = result.bytes.read, result.bytes.written
    rate = rate_text(read + written, result.weights_seconds)
    facts = {
        "Size": _size_change(read, written),
        "Time": f"{duration_text(result.seconds)}, {rate} read and written",
        "Peak memory": size_text(result.peak_rss_bytes),
    }
    return Group(
        *heading(f"{result.source.name} → {result.output}"),
        Text(" ".join(filter(None, (f"Rewritten with {done_words(result)}.", inputs_sentence(result))))),
        after_gap(facts_grid(facts)),
        *_done(result.tensors),
        *_worst(result.tensors),
        *_verification(result.verify),
        *note_list("Warnings", result.warnings),
        Text(f"\nThe page with plots is {result.output}/report.html; {_opening(result)}."),
    )


def _opening(result: ConvertResult) -> str:
    """How a Python program opens the output."""
    is_plain = result.options.get("layout", "lpconv") != "lpconv"
    return f"the model opens with {'from_pretrained' if is_plain else 'lpconv.load'}('{result.output}')"


def render_part(result: PartResult) -> RenderableType:
    """What one worker wrote, and what is left to do."""
    result = printable_record(result)
    files = tuple(f for s in result.shards for f in s.files)
    facts = {
        "Size": _size_change(result.bytes.read, result.bytes.written),
        "Time": duration_text(result.seconds),
        "Peak memory": size_text(result.peak_rss_bytes),
    }
    empty = "The plan has fewer files than parts, and none for this one; --max-shard-size makes more."
    return Group(
        *heading(f"Part {result.part}/{result.parts} of {result.output}"),
        Text("Nothing is published before all parts are there, and put together by --finish." if files else empty),
        after_gap(facts_grid(facts)),
        *_files(files),
    )


def render_plan(plan: PlanResult) -> RenderableType:
    """What a conversion would write and what it would need, before any of it is done."""
    plan = printable_record(plan)
    facts = {
        "Size": _size_change(plan.bytes.read, plan.bytes.written),
        "Disk": f"{size_text(plan.disk_bytes)} needed, {size_text(plan.disk_free_bytes)} free",
        "Memory": f"{size_text(plan.memory_bytes)} with {plural(plan.workers, 'worker')}",
        "Time": f"about {duration_text(plan.seconds)}",
    }
    if plan.side_files:
        facts["Copied as is"] = f"{plural(len(plan.side_files), 'file')}: {', '.join(plan.side_files)}"
    return Group(
        *heading(f"{plan.source.name} → {plan.output}"),
        Text(f"Plan for {method_name(plan.method)} in {plan.format}. Nothing has been written."),
        after_gap(facts_grid(facts)),
        *_done(plan.tensors),
        *_files(plan.shards),
        *note_list("Warnings", plan.warnings),
    )


def render_inspect(found: InspectResult, *, every: bool = False) -> RenderableType:
    """The verdict on a checkpoint, what it rests on, and what the checkpoint holds; `every` tensor only if asked."""
    found = printable_record(found)
    made = f"lpconv, {method_name(found.method)}" if found.method else f"quantised by {found.layout}"
    made = made if found.method or found.layout else "an ordinary checkpoint"
    facts = {
        "Kind": made + (f", {found.format}" if found.format else ""),
        "Architecture": found.architecture or "not named in config.json",
        "Parameters": count_text(sum(math.prod(t.shape) for t in found.tensors)),
        "Size": size_text(sum(d.size_bytes for d in found.dtypes)),
    }
    if found.bits_per_weight is not None:
        facts["Bits"] = f"{found.bits_per_weight:.2f} for each quantised weight, scales included"
    looked = {"Checked": found.checked, "Not checked": found.not_checked}
    most = None if every else _SHOWN
    listed = "" if every else f"{plural(len(found.tensors), 'tensor')}; --all lists them"
    return Group(
        Text.assemble((f"{found.path}: ", "bold"), _judgement(found)),
        facts_grid({label: ", ".join(what) for label, what in looked.items() if what}),
        *note_list("Problems", _first(found.problems, most)),
        *note_list("Warnings", _first(found.warnings, most)),
        after_gap(facts_grid(facts)),
        *_dtypes(found),
        *_files(found.shards),
        *note_list("Tied", _first([f"{name} → {weight}" for name, weight in found.ties.items()], most)),
        *(_stored(found.tensors) if every else (Text(), Text(listed))),
    )


def _judgement(found: InspectResult) -> tuple[str, str]:
    """The verdict on a checkpoint in a few words, with the scales that it does not cover, and its style."""
    warned = plural(len(found.warnings), "warning")
    if found.not_judged and not found.problems:
        return f"not judged, {found.not_judged}", "bold yellow"
    rest = "".join(f"; not judged: {what}" for what in found.not_checked if "scales" in what)
    if found.problems:
        return plural(len(found.problems), "problem") + (f", {warned}" if found.warnings else "") + rest, "bold red"
    return (
        (f"no problem, {warned}{rest}", "bold yellow") if found.warnings else (f"no problem found{rest}", "bold green")
    )


def _first(notes: Sequence[str], most: int | None) -> Sequence[str]:
    """At most so many notes, and how many more there are."""
    return notes if most is None or len(notes) <= most else [*notes[:most], f"and {len(notes) - most} more (--all)"]


def render_compare(results: Sequence[ConvertResult]) -> RenderableType:
    """Runs side by side, one column each; as many tables as the width asks for."""
    runs = [printable_record(r) for r in results]
    return SideBySide(names=run_names([r.output for r in runs]), figures=figures(runs))


def _size_change(before: int, after: int) -> str:
    share = f", {share_text(after, before)} of the source" if before > 0 else ""
    return f"{size_text(before)} → {size_text(after)} ({change_text(before, after)}{share})"


def _done(tensors: Sequence[TensorRecord]) -> tuple[RenderableType, ...]:
    groups = done_groups(tensors)
    if not groups:
        return section("Tensors", Text("The checkpoint holds no tensors."))
    table = table_of(*DONE_COLUMNS, rows=map(done_row, groups[:_GROUPS]))
    rest = sum(g.num_tensors for g in groups[_GROUPS:])
    more = [Text(f"and {plural(rest, 'tensor')} for other reasons")] if rest else []
    return section("Tensors", Group(table, *more))


def _worst(tensors: Sequence[TensorRecord]) -> tuple[RenderableType, ...]:
    worst = worst_tensors(tensors, _WORST)
    if not worst:
        return ()
    rounding_alone = all(besides_rounding(t) == "nothing" for t in worst)
    last = -1 if rounding_alone else None
    rows: Iterable[tuple[str | Name, ...]] = ((Name(name=t.name), *worst_row(t)[1:last]) for t in worst)
    title = "Lowest signal-to-noise" + (" (from rounding alone)" if rounding_alone else "")
    return section(title, table_of(*WORST_COLUMNS[:last], rows=rows))


def _verification(v: VerifyResult) -> tuple[RenderableType, ...]:
    word = outcome_of(v)
    title = Text.assemble(("Verification: ", "bold"), (word, _STYLES[word]))
    if word != "not run":
        title.append(f" (level {v.level})")
    steps = Table.grid(padding=(0, 2))
    for check in checks(v):
        steps.add_row(Text(check.outcome, style=_STYLES[check.outcome]), Text(check.name), Text(check.text))
    problems = note_list("Problems", v.problems)
    return (Text(), title, *([steps] if steps.row_count else []), *problems)


def _files(files: Sequence[FileRecord]) -> tuple[RenderableType, ...]:
    if not files:
        return ()
    table = table_of("File", "Size", rows=((Name(name=f.name), size_text(f.size_bytes)) for f in files[:_SHARDS]))
    rest = files[_SHARDS:]
    more = [Text(f"and {plural(len(rest), 'file')}, {size_text(sum(f.size_bytes for f in rest))}")] if rest else []
    return section("Files", Group(table, *more))


def _dtypes(found: InspectResult) -> tuple[RenderableType, ...]:
    if not found.dtypes:
        return ()
    rows = ((d.dtype, *map(count_text, (d.num_tensors, d.num_elements)), size_text(d.size_bytes)) for d in found.dtypes)
    return section("Dtypes", table_of("Dtype", "Tensors", "Elements", "Size", rows=rows))


def _stored(tensors: Sequence[StoredTensor]) -> tuple[RenderableType, ...]:
    if not tensors:
        return ()
    shown = {heading: cell for heading, cell in _STORED_COLUMNS.items() if any(map(cell, tensors))}
    rows: Iterable[tuple[str | Name, ...]] = ((Name(name=t.name), *(c(t) for c in shown.values())) for t in tensors)
    return section("Tensors", table_of("Tensor", *shown, rows=rows))


# Columns beside the name; those whose cells are all empty are left out.
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
