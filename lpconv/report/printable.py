"""Names and messages from untrusted files, made safe to print.

A tensor name may hold anything: terminal escapes, line breaks, right-to-left overrides, lone surrogates. Renderers
pass their record through `printable_record` first, so no later step has to think about it. HTML and Markdown escape
their own special characters on top of this; what Markdown needs is here.
"""

import dataclasses
import operator
import re
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# An underscore inside a word is no markup.
_SPECIAL = re.compile(r"([\\`*\[\]#|~$]|(?<!\w)_|_(?!\w))")


def printable(text: str) -> str:
    """`text` with every non-printing character (control, format, surrogate) written as a backslash escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_record(record: T) -> T:
    """The same record with all its strings printable."""
    cleaned: T = _clean(record)
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in type(value).__dataclass_fields__}
        changed = {name: found for name, v in fields.items() if (found := _clean(v)) is not v}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        cleaned = type(value)(map(_clean, value))
        return value if all(map(operator.is_, cleaned, value)) else cleaned
    return value


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
