"""Markdown of text that may hold anything."""

import re
from collections.abc import Sequence

__all__ = ["code_span", "escaped", "fence_for", "table"]

# An underscore inside a word is no markup.
_SPECIAL = re.compile(r"([\\`*\[\]#|~$]|(?<!\w)_|_(?!\w))")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table of cells that are escaped already."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escaped(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return _SPECIAL.sub(r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")


def code_span(text: str) -> str:
    """A code span, also inside a table, where even a code span may not hold a bare pipe."""
    ticks = fence_for(text, least=1)
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}".replace("|", "\\|")


def fence_for(text: str, least: int = 3) -> str:
    """More backticks than any run of them in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)
