"""Make names and messages from untrusted files safe to print.

A tensor name may contain anything: terminal escapes, line breaks, right-to-left overrides, lone surrogates. Renderers
pass their document through `printable_record` first, so later steps can ignore this. HTML and Markdown also escape
their own special characters.
"""

import dataclasses
import operator
from typing import Any, TypeVar

T = TypeVar("T")


def printable(text: str) -> str:
    """`text` with every non-printing character (control, format, surrogate) written as a backslash escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_record(record: T) -> T:
    """A copy of the record with all strings printable."""
    cleaned: T = _clean(record)
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in type(value).__dataclass_fields__}
        changed = {name: clean for name, v in fields.items() if (clean := _clean(v)) is not v}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        cleaned = type(value)(map(_clean, value))
        return value if all(map(operator.is_, cleaned, value)) else cleaned
    return value
