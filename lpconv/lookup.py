"""Names people type: find them, or say which known name is nearest."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from lpconv.errors import LpconvError, UsageError

__all__ = ["find", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when none is like it (similarity below 0.6)."""
    import difflib  # only who mistypes waits for it

    by_folded = {k.casefold(): k for k in known}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[matches[0]] if matches else None


def find(what: str, name: str, table: Mapping[str, T], *, error: type[LpconvError] = UsageError) -> T:
    """`table[name]`; an unknown name raises `error` with the nearest known name, or all of them, as its hint."""
    if name in table:
        return table[name]
    near = nearest(name, table)
    hint = f"did you mean `{near}`?" if near else "known: " + ", ".join(table)
    raise error(f"unknown {what} `{name}`", hint=hint)
