"""Render documents for a terminal or pipe, within its width and without relying on colour.

Import this module lazily: it loads rich. Strings become `Text` here, never markup: a tensor may be called ``[red]``.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table as _RichTable
from rich.text import Text

from lpconv.report.document import Block, Cell, Checks, Code, Document, Section, Table, section, sections_of
from lpconv.report.numbers import plural
from lpconv.report.printable import printable_record

_PIPE_WIDTH = 120
# Replacements for encodings without these characters.
_ASCII = str.maketrans({"→": "->", "…": "~", "–": "-", "─": "-", "━": "-"})

_MAX_WORD = 30  # longest unbroken word in a wrapping table cell
_GAP, _UNBOUNDED = 2, 10_000  # spaces between columns; a width that fits any cell
_READABLE = 30  # most characters of a text that never moves to a line of its own


_STYLES = {"passed": "bold green", "failed": "bold red", "not run": "bold yellow"}


def terminal(document: Document) -> RenderableType:
    """Render a document for a terminal, without charts and page-only sections."""
    shown, parts = printable_record(document), list[RenderableType]([_headline(document)])
    parts += [Text(text, overflow="fold") for text in (shown.subtitle, shown.summary) if text]
    tiles = {tile.label: ", ".join(filter(None, (tile.figure, tile.detail))) for tile in shown.tiles}
    parts += [_with_gap(_grid(values.items())) for values in (tiles, shown.facts) if values]
    for part in sections_of(*shown.sections, section("Warnings", shown.warnings)):
        parts += _section(part) if part.only != "page" else ()
    return Group(*parts)


def _headline(document: Document) -> Text:
    """The title of a document, and its verdict if it has one."""
    shown = printable_record(document)
    if shown.verdict is None:
        return Text(shown.title, style="bold")
    return Text.assemble((f"{shown.title}: ", "bold"), (shown.verdict.text, _STYLES[shown.verdict.outcome]))


def _section(part: Section) -> tuple[RenderableType, ...]:
    """An empty line, the title and the blocks; nothing if the section has only charts."""
    bodies = [body for block in part.blocks if (body := _block(block)) is not None]
    if not bodies:
        return ()
    style = _STYLES[part.outcome] if part.outcome else "bold"
    title = [Text(part.title, style=style)] if part.title else []
    return (Text(), *title, bodies[0], *map(_with_gap, bodies[1:]))


def _block(block: Block) -> RenderableType | None:
    """Render a non-empty block; None for charts."""
    if isinstance(block, str):
        return Text(block, overflow="fold")
    if isinstance(block, tuple):
        return _grid((("-", line) for line in block), gap=1)
    if isinstance(block, Checks):
        return _grid((Text(c.outcome, style=_STYLES[c.outcome]), c.name, c.text) for c in block.checks)
    if isinstance(block, Table):
        return Text(f"{block.folded}: see the HTML page") if block.folded else _table(block)
    if isinstance(block, Mapping):
        return _grid(block.items())
    if isinstance(block, Code):
        return Text("\n".join(f"  {line}" for line in block.lines), no_wrap=True, overflow="ignore")
    return None


def _grid(rows: Iterable[tuple[str | Text, ...]], gap: int = 2) -> _RichTable:
    grid = _RichTable.grid(padding=(0, gap))
    for row in rows:
        grid.add_row(*(Text(cell, overflow="fold") if isinstance(cell, str) else cell for cell in row))
    return grid


def _cell(cell: str | Cell) -> str | Text:
    if isinstance(cell, str):
        return cell
    return Text(cell.text, style=_STYLES[cell.outcome]) if cell.outcome else cell.text


def _table(table: Table) -> RenderableType:
    rows = table.rows if table.most is None else table.rows[: table.most]
    texts = (list(map(_cell, row)) for row in rows)
    cells = [
        (Name(name=first) if table.has_names and isinstance(first, str) else first, *rest) for first, *rest in texts
    ]
    columns = [f"<{c.removeprefix('<')}" if table.compares else c for c in table.columns]
    parts: list[RenderableType] = [Text(table.caption)] if table.caption else []
    parts.append(_Fitting(columns, cells, may_move=not table.compares))
    if len(rows) < len(table.rows):
        parts.append(Text(f"and {plural(len(table.rows) - len(rows), 'more row')}"))
    return Group(*parts)


@dataclass(frozen=True, kw_only=True)
class Name:
    """A dotted name that abbreviates its outer modules to their first letters in narrow columns.

    ``encoder.layer.0.attention.self.key.weight`` becomes ``e.l.0.attention.self.key.weight``: numbers and the end,
    which distinguish tensors, stay. A name that is still too long is wrapped, never cut.
    """

    name: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(_abbreviate(self.name, options.max_width), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(_abbreviate(self.name, 0)), len(self.name))


def _abbreviate(name: str, width: int) -> str:
    parts = name.split(".")
    for i, part in enumerate(parts[:-2]):
        if len(".".join(parts)) <= width:
            break
        parts[i] = part if part.isdecimal() else part[:1]
    return ".".join(parts)


def _with_gap(body: RenderableType) -> RenderableType:
    return Group(Text(), body)


class _Fitting(_RichTable):
    """A table that adapts to narrow terminals without cutting any value.

    It first gives long sentences lines of their own below their rows (if `may_move`), then breaks its headings, and
    then splits into several tables, one below the other, each with the first column.
    """

    def __init__(self, headings: Sequence[str], cells: Sequence[tuple[Any, ...]], *, may_move: bool = False) -> None:
        super().__init__(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
        self._headings, self._cells, self._may_move = headings, cells, may_move
        for i, heading in enumerate(headings):
            left = i == 0 or heading.startswith("<")
            self.add_column(Text(heading.removeprefix("<")), justify="left" if left else "right", overflow="fold")
        for row in cells:
            self.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spans = [_column_widths(column, console, options) for column in self.columns]
        room = options.max_width - _GAP * (len(spans) - 1)
        if moved := self._long_texts(spans, options.max_width):
            yield from self._in_lines(moved, spans, options.max_width)
            return
        if sum(least for least, _ in spans) <= room or len(spans) < 3:
            self._share(spans, room)
            yield from super().__rich_console__(console, options)
            return
        count, used = 1, spans[0][0]
        while count < 2 or used + spans[count][0] + _GAP <= options.max_width:
            used += spans[count][0] + _GAP
            count += 1
        yield from (self._of(range(count)), Text(), self._of([0, *range(count, len(spans))]))

    def _of(self, columns: Sequence[int]) -> "_Fitting":
        return _Fitting([self._headings[i] for i in columns], [tuple(row[i] for i in columns) for row in self._cells])

    def _long_texts(self, spans: Sequence[tuple[int, int]], width: int) -> list[int]:
        """The columns of sentences, if the table is too wide with them, but not without them."""
        texts = [i for i, h in enumerate(self._headings) if i and h.startswith("<") and spans[i][1] > _READABLE]
        needed = [spans[i][self._is_text(i)] + _GAP for i in range(len(spans))]
        without = sum(needed) - sum(needed[i] for i in texts)
        return texts if self._may_move and without - _GAP <= width < sum(needed) - _GAP else []

    def _is_text(self, column: int) -> bool:
        """Whether a column has no names, which can be abbreviated."""
        return not any(isinstance(cell, Name) for cell in self.columns[column].cells)

    def _in_lines(self, moved: Sequence[int], spans: Sequence[tuple[int, int]], width: int) -> RenderResult:
        """The table with the cells of some columns below each row, and their headings below the others."""
        kept = [i for i in range(len(spans)) if i not in moved]
        table = self._of(kept)
        table._share([spans[i] for i in kept], width - _GAP * (len(kept) - 1))
        headings = tuple(Text(heading.removeprefix("<")) for heading in self._headings)
        for number, row in enumerate((headings, *self._cells)):
            line = _RichTable.grid(padding=(0, _GAP, 0, 0))
            for column in table.columns:
                line.add_column(justify=column.justify, width=column.width, overflow="fold")
            line.add_row(*(row[i] for i in kept))
            yield line
            yield from (Padding(row[i], (0, 0, 0, _GAP)) for i in moved if row[i])
            if number == 0:
                yield Text("─" * width)

    def _share(self, spans: Sequence[tuple[int, int]], room: int) -> None:
        """Set column widths within `room`: minimum widths first, then more for narrow columns, and names last."""
        widths = [least for least, _ in spans]
        for is_text in (True, False):
            growing = [i for i in range(len(spans)) if self._is_text(i) is is_text]
            while sum(widths) < room and (growing := [i for i in growing if widths[i] < spans[i][1]]):
                widths[min(growing, key=lambda i: widths[i])] += 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width


def _column_widths(column: Column, console: Console, options: ConsoleOptions) -> tuple[int, int]:
    """(minimum, natural) width of a column.

    Headings may break between words, and texts too if their longest word has no more than `_MAX_WORD` letters.
    """
    wide = options.update(max_width=_UNBOUNDED)
    heading, *cells = (Measurement.get(console, wide, cell) for cell in (column.header, *column.cells))
    figures = max((m.maximum for m in cells), default=0)
    words = min(max((m.minimum for m in cells), default=0), _MAX_WORD)
    return max(heading.minimum, figures if column.justify == "right" else words), max(heading.maximum, figures)


def show(shown: Document | Table, *, file: TextIO | None = None, brief: bool = False) -> None:
    """Print a document or a table to `file` (default stdout): styled on a terminal, else as plain text.

    With `brief`, only the headline of a document is printed. Encodings without the needed characters get ASCII. A pipe
    has no width, so it gets 120 columns unless ``COLUMNS`` is set. rich honours ``NO_COLOR``.
    """
    out = file or sys.stdout
    console = Console(file=out, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        width = console.width if "COLUMNS" in os.environ else _PIPE_WIDTH
        console = Console(file=out, highlight=False, width=width, no_color=True)
    with console.capture() as capture:
        parts = (
            (_headline if brief else terminal)(shown)
            if isinstance(shown, Document)
            else _table(printable_record(shown))
        )
        console.print(parts, crop=False)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
    if "utf" not in (getattr(out, "encoding", None) or "utf-8").lower():
        text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
    out.write(text)
