"""Names and messages from untrusted files, made safe to print.

A tensor name may hold anything: terminal escapes, line breaks, right-to-left overrides, lone surrogates. Renderers
pass their record through `printable_record` first, so no later step has to think about it. HTML and Markdown escape
their own special characters on top of this.
"""

import dataclasses
from typing import Any, TypeVar

__all__ = ["printable", "printable_record"]

T = TypeVar("T")


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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _clean(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_clean(v) for v in value)
    return value
