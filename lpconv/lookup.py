"""Names people type: find them, or say which known name is nearest."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from lpconv.errors import InputError, LpconvError, UsageError

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


def nearest_name(part: str, names: Iterable[str]) -> str | None:
    """The dotted name most like `part` as a whole, or the first with a piece of it like `part`; None where none is."""
    names = list(names)
    pieces = {piece: name for name in reversed(names) for piece in name.split(".")}
    near = nearest(part, pieces)
    return nearest(part, names) or (pieces[near] if near else None)


def nearest_beside(path: Path) -> Path | None:
    """The directory whose name is most like that of a path that does not exist; None where none beside it is."""
    try:
        near = nearest(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()])
    except OSError:  # nothing there, or nothing that we may look at
        return None
    return path.parent / near if near else None


def no_directory(path: str | Path, *, hint: str) -> InputError:
    """The refusal of a path where there should be a directory: with the one that may be meant, or `hint`."""
    if os.path.exists(path):  # which never raises, whatever was typed
        return InputError(f"`{path}` is no directory", hint=hint)
    near = nearest_beside(Path(path))
    return InputError(f"no directory `{path}`", hint=f"did you mean `{near}`?" if near else hint)
