"""What was sent to the hub, on the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.numbers import plural, size_text
from lpconv.report.printable import printable_record
from lpconv.report.terminal import Name, facts_grid, heading, section, table_of
from lpconv.results import PushResult

__all__ = ["render_push"]


def render_push(result: PushResult) -> RenderableType:
    """The files of the commit, and where it is; of a dry run what would be sent."""
    result = printable_record(result)
    total = size_text(sum(f.size_bytes for f in result.files))
    facts = {
        "Commit": result.commit or "none: a dry run",
        "Message": result.message,
        "Sent" if result.commit else "Would send": f"{plural(len(result.files), 'file')}, {total}, in one commit",
        "Verified": f"yes, level {result.level}",
    }
    rows = ((Name(name=f.name), size_text(f.size_bytes)) for f in result.files)
    return Group(
        *heading(f"{result.path} → {result.repo_id}"),
        facts_grid(facts),
        *section("Files", table_of("File", "Size", rows=rows)),
        *([Text(), Text(result.url)] if result.url else []),
    )
