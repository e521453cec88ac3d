"""Records as rich renderables. They fit 80 columns, use what a wider terminal gives, and mean nothing by colour alone.

Import this module lazily: it loads rich. `show` prints to a terminal or a pipe.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lpconv.report.compare import Figure, figures, run_names
from lpconv.report.grouping import DoneGroup, done_groups, worst_tensors
from lpconv.report.numbers import (
    change_text,
    count_text,
    duration_text,
    error_text,
    number_text,
    plural,
    rate_text,
    scale_text,
    shape_text,
    share_text,
    size_text,
    sqnr_text,
)
from lpconv.report.printable import printable_record
from lpconv.report.words import checks, done_words, method_name, verdict, why_noisy
from lpconv.results import (
    ConvertResult,
    FileRecord,
    InspectResult,
    PlanResult,
    StoredTensor,
    TensorRecord,
    VerifyResult,
)

__all__ = ["render_compare", "render_convert", "render_inspect", "render_plan", "render_verify", "show"]

_WORST = 8
_GROUPS = 12
_SHARDS = 8
_PIPE_WIDTH = 120
# A name is abbreviated to about this width before other columns begin to wrap.
_NAME_WIDTH = 30
# The widest column of a run in a comparison.
_RUN_WIDTH = 24
_STYLES = {"passed": "bold green", "failed": "bold red", "not run": "yellow"}
# Where the output's encoding has no room for them.
_ASCII = str.maketrans({"→": "->", "…": "~", "–": "-", "─": "-", "━": "-"})


def show(renderable: RenderableType, *, file: TextIO | None = None) -> None:
    """Print to `file` (stdout): styled for a terminal, plain text for anything else, ASCII where the encoding needs it.

    A pipe has no width, so it gets 120 columns. rich honours ``NO_COLOR`` and ``COLUMNS``.
    """
    out = file or sys.stdout
    console = Console(file=out, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=out, highlight=False, width=max(console.width, _PIPE_WIDTH), no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
    if "utf" not in (getattr(out, "encoding", None) or "utf-8").lower():
        text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
    out.write(text)


def render_convert(result: ConvertResult) -> RenderableType:
    """What was done, what it saved, what it cost in accuracy, and how it was checked."""
    result = printable_record(result)
    read, written = result.bytes.read, result.bytes.written
    facts = {
        "Size": _size_change(read, written),
        "Time": f"{duration_text(result.seconds)}, {rate_text(read + written, result.seconds)} read and written",
        "Peak memory": size_text(result.peak_rss_bytes),
    }
    return Group(
        *_heading(f"{result.source.name} → {result.output}"),
        Text(f"Rewritten with {done_words(result)}."),
        _gap(_facts(facts)),
        *_done(result.tensors),
        *_worst(result.tensors),
        *_verification(result.verify),
        *_notes("Warnings", result.warnings),
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
        *_heading(f"{plan.source.name} → {plan.output}"),
        Text(f"Plan for {method_name(plan.method)} in {plan.format}. Nothing has been written."),
        _gap(_facts(facts)),
        *_done(plan.tensors),
        *_files(plan.shards),
        *_notes("Warnings", plan.warnings),
    )


def render_verify(v: VerifyResult) -> RenderableType:
    """Every check that ran, its outcome in words, and what failed."""
    return Group(*_verification(printable_record(v))[1:])


def render_inspect(found: InspectResult) -> RenderableType:
    """What a checkpoint holds: dtypes, files, ties, problems, and its tensors where the record lists them."""
    found = printable_record(found)
    made = f"lpconv, {method_name(found.method)}" if found.method else "an ordinary checkpoint"
    facts = {
        "Kind": made + (f", {found.format}" if found.format else ""),
        "Architecture": found.architecture or "not named in config.json",
        "Parameters": count_text(sum(d.num_elements for d in found.dtypes)),
        "Size": size_text(sum(d.size_bytes for d in found.dtypes)),
    }
    return Group(
        *_heading(found.path),
        _facts(facts),
        *_dtypes(found),
        *_files(found.shards),
        *_notes("Tied", [f"{name} → {weight}" for name, weight in found.ties.items()]),
        *_stored(found.tensors),
        *_notes("Problems", found.problems, empty="none found in headers and index"),
    )


def render_compare(results: Sequence[ConvertResult]) -> RenderableType:
    """Runs side by side, one column each; as many tables as the width asks for."""
    runs = [printable_record(r) for r in results]
    return _Compare(names=run_names(runs), figures=figures(runs))


@dataclass(frozen=True, kw_only=True)
class _Compare:
    """A table of figures, cut into several where the runs do not fit side by side."""

    names: tuple[str, ...]
    figures: tuple[Figure, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label_width = max((len(f.label) for f in self.figures), default=0)
        width = min(max(map(len, self.names), default=0), _RUN_WIDTH)
        per_table = max(1, (options.max_width - label_width) // (width + 2))
        for start in range(0, len(self.names), per_table):
            columns = slice(start, start + per_table)
            table = _table("", *(f"<{name}" for name in self.names[columns]))
            for column in table.columns[1:]:
                column.max_width = _RUN_WIDTH
            for figure in self.figures:
                table.add_row(Text(figure.label), *(Text(v) for v in figure.values[columns]))
            yield from (Text(), table) if start else (table,)


@dataclass(frozen=True, kw_only=True)
class _Name:
    """A dotted name that shortens its outer modules to their first letters where the column is narrow.

    ``encoder.layer.0.attention.self.key.weight`` becomes ``e.l.0.attention.self.key.weight``: numbers and the end,
    which tell tensors apart, stay. A name that is still too long is folded, never cut.
    """

    name: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(_abbreviated(self.name, options.max_width), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_abbreviated_width(self.name), len(self.name))


def _abbreviated_width(name: str) -> int:
    return min(len(_abbreviated(name, _NAME_WIDTH)), _NAME_WIDTH)


def _abbreviated(name: str, width: int) -> str:
    parts = name.split(".")
    for i, part in enumerate(parts[:-2]):
        if len(".".join(parts)) <= width:
            break
        parts[i] = part if part.isdecimal() else part[:1]
    return ".".join(parts)


def _heading(text: str) -> Iterable[RenderableType]:
    return (Text(text, style="bold"), Text())


def _section(title: str, body: RenderableType) -> tuple[RenderableType, ...]:
    return (Text(), Text(title, style="bold"), body)


def _gap(body: RenderableType) -> RenderableType:
    return Padding(body, (1, 0, 0, 0))


def _facts(facts: dict[str, str]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for label, value in facts.items():
        grid.add_row(Text(label), Text(value, overflow="fold"))
    return grid


def _table(*columns: str) -> Table:
    """Columns by heading: ``<`` before it aligns left and may wrap; numbers align right and never wrap."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for i, heading in enumerate(columns):
        left = i == 0 or heading.startswith("<")
        table.add_column(
            Text(heading.removeprefix("<")), justify="left" if left else "right", no_wrap=not left, overflow="fold"
        )
    return table


def _size_change(before: int, after: int) -> str:
    share = f", {share_text(after, before)} of the source" if before > 0 else ""
    return f"{size_text(before)} → {size_text(after)} ({change_text(before, after)}{share})"


def _done(tensors: Sequence[TensorRecord]) -> tuple[RenderableType, ...]:
    groups = done_groups(tensors)
    if not groups:
        return _section("Tensors", Text("The checkpoint holds no tensors."))
    table = _table("Action", "Tensors", "<Format", "Before", "After", "<Why")
    for g in groups[:_GROUPS]:
        table.add_row(
            Text(g.action),
            Text(count_text(g.num_tensors)),
            Text(_formats(g)),
            Text(size_text(g.bytes_in)),
            Text(size_text(g.bytes_out)),
            Text(g.reason),
        )
    rest = sum(g.num_tensors for g in groups[_GROUPS:])
    more = [Text(f"and {plural(rest, 'tensor')} for other reasons")] if rest else []
    return _section("Tensors", Group(table, *more))


def _formats(g: DoneGroup) -> str:
    return f"{g.source_dtype} → {g.format}" if g.action == "convert" else g.source_dtype


def _worst(tensors: Sequence[TensorRecord]) -> tuple[RenderableType, ...]:
    worst = worst_tensors(tensors, _WORST)
    if not worst:
        return ()
    reasons = [why_noisy(t) for t in worst]
    shared = len(set(reasons)) == 1
    table = _table("Tensor", "<Format", "SQNR dB", "Max rel", "Scale", *([] if shared else ["<Why"]))
    table.columns[0].min_width = max(_abbreviated_width(t.name) for t in worst)
    for t, reason in zip(worst, reasons, strict=True):
        table.add_row(
            _Name(name=t.name),
            Text(t.format),
            Text(sqnr_text(t.sqnr_db)),
            Text(error_text(t.max_rel_error)),
            Text(scale_text(t.scale)),
            *([] if shared else [Text(reason)]),
        )
    return _section("Lowest signal-to-noise" + (f" ({reasons[0]})" if shared else ""), table)


def _verification(v: VerifyResult) -> tuple[RenderableType, ...]:
    word = verdict(v)
    title = Text.assemble(("Verification: ", "bold"), (word, _STYLES[word]))
    if word != "not run":
        title.append(f" (level {v.level})")
    steps = Table.grid(padding=(0, 2))
    for check in checks(v):
        outcome = {True: "passed", False: "failed", None: "not run"}[check.passed]
        steps.add_row(Text(outcome, style=_STYLES[outcome]), Text(check.name), Text(check.text))
    problems = _notes("Problems", v.problems) if v.problems else ()
    return (Text(), title, *([steps] if steps.row_count else []), *problems)


def _notes(title: str, notes: Sequence[str], *, empty: str = "") -> tuple[RenderableType, ...]:
    if not notes and not empty:
        return ()
    grid = Table.grid(padding=(0, 1))
    for note in notes or (empty,):
        grid.add_row(Text("-" if notes else ""), Text(note, overflow="fold"))
    return _section(title, grid)


def _files(files: Sequence[FileRecord]) -> tuple[RenderableType, ...]:
    if not files:
        return ()
    table = _table("File", "Size")
    for f in files[:_SHARDS]:
        table.add_row(_Name(name=f.name), Text(size_text(f.size_bytes)))
    rest = files[_SHARDS:]
    more = [Text(f"and {plural(len(rest), 'file')}, {size_text(sum(f.size_bytes for f in rest))}")] if rest else []
    return _section("Files", Group(table, *more))


def _dtypes(found: InspectResult) -> tuple[RenderableType, ...]:
    if not found.dtypes:
        return ()
    table = _table("Dtype", "Tensors", "Elements", "Size")
    for d in found.dtypes:
        table.add_row(Text(d.dtype), count_text(d.num_tensors), count_text(d.num_elements), size_text(d.size_bytes))
    return _section("Dtypes", table)


def _stored(tensors: Sequence[StoredTensor]) -> tuple[RenderableType, ...]:
    if not tensors:
        return ()
    shown = [c for c in _STORED_COLUMNS if c.always or any(c.cell(t) for t in tensors)]
    table = _table(*(c.heading for c in shown))
    for t in tensors:
        table.add_row(_Name(name=t.name), *(Text(c.cell(t)) for c in shown[1:]))
    return _section("Tensors", table)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column of the table of stored tensors; the ones that are not `always` there vanish where all are empty."""

    heading: str
    cell: Callable[[StoredTensor], str]
    always: bool = False


_STORED_COLUMNS = (
    _Column(heading="Tensor", cell=lambda t: t.name, always=True),
    _Column(heading="<Dtype", cell=lambda t: t.dtype, always=True),
    _Column(heading="Shape", cell=lambda t: shape_text(t.shape), always=True),
    _Column(heading="Size", cell=lambda t: size_text(t.size_bytes), always=True),
    _Column(heading="Scale", cell=lambda t: scale_text(t.scale) if t.scale is not None else ""),
    _Column(heading="RMS", cell=lambda t: number_text(t.rms) if t.rms is not None else ""),
    _Column(heading="Largest", cell=lambda t: number_text(t.absmax) if t.absmax is not None else ""),
    _Column(heading="NaN", cell=lambda t: count_text(t.num_nan) if t.num_nan else ""),
    _Column(heading="Inf", cell=lambda t: count_text(t.num_inf) if t.num_inf else ""),
)
