"""An advice on the terminal: what to do, then every candidate, then what is not known.

Import this module lazily: it loads rich.
"""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.advise.words import COLUMNS, HEADINGS, PART_COLUMNS, cells, of_purpose, part_rows
from lpconv.report.printable import printable_record
from lpconv.report.terminal import Name, facts_grid, heading, note_list, section, table_of
from lpconv.results import AdviceResult


def render_advice(result: AdviceResult) -> RenderableType:
    """The recommendations first, in words."""
    result = printable_record(result)
    parts: list[RenderableType] = [*heading(f"Advice for {result.name}"), facts_grid(result.facts)]
    for advised in result.recommendations:
        parts += section(HEADINGS[advised.purpose], Text(advised.words))
        if advised.command:
            parts.append(Text(f"  {advised.command}", overflow="fold"))
        parts += _table(result, advised.purpose)
    if result.parts:
        rows_of_parts = ((Name(name=name), *rest) for name, *rest in part_rows(result))
        parts += section(f"Where {result.parts_of} costs most", table_of(*PART_COLUMNS, rows=rows_of_parts))
    parts += note_list("One step in low precision", result.findings)
    parts += note_list("What this does not know", result.unknowns)
    parts += note_list("Warnings", result.warnings)
    return Group(*parts)


def _table(result: AdviceResult, purpose: str) -> Iterator[RenderableType]:
    """The candidates of a purpose; of conversions only those that were looked at, for there are many."""
    rows = of_purpose(result, purpose)
    shown = [r for r in rows if purpose != "infer" or r.status != "pruned"]
    if shown:
        yield Text()
        yield table_of(*COLUMNS[purpose], rows=(cells(result, r) for r in shown))
    if len(shown) < len(rows):
        count = len(rows) - len(shown)
        yield Text(f"{count} more cannot be better than these: the page and the JSON say of each why.")
