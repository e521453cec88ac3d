"""Look up names that people type, suggest the nearest known name, and compare names of parameters."""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from lpconv.errors import InputError, LpconvError, UsageError

T = TypeVar("T")
_UNFINISHED = (".partial", ".parts", ".failed")  # folders of runs
# Methods and formats of other tools, by the beginnings of their names, and what to type instead.
_ELSEWHERE = {
    **dict.fromkeys(("gptq", "awq", "autoround"), "use --scheme W4A16 --rounding gptq --calibrate self"),
    "nf4": "use --format int4 or --format fp4",
    **dict.fromkeys(("q4_", "q8_"), "for llama.cpp use --scheme GGUF_Q4_0 or --scheme GGUF_Q8_0"),
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that begins with `name`, else the most similar one, or None if the similarity is below 0.6."""
    import difflib  # imported late: only mistyped names need it

    by_folded, folded = {k.casefold(): k for k in known}, name.casefold()
    begun = [k for k in by_folded if len(folded) > 2 and k.startswith(folded)]
    matches = begun or difflib.get_close_matches(folded, by_folded, n=1)
    return by_folded[matches[0]] if matches else None


def is_same_name(a: str, b: str) -> bool:
    """Whether two names of a parameter differ at most in a prefix, which transformers may add or remove."""
    return f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")


def known_name(name: str, known: Collection[str], spellings: Mapping[str, str] | None = None) -> str | None:
    """The known name that `name` stands for, or None: in any case, or by `spellings`, which are in lower case."""
    if name in known:
        return name
    folded = {k.casefold(): k for k in known}
    meant = (spellings or {}).get(name.casefold())
    return folded.get(name.casefold()) or (meant if meant in known else None)


def find(what: str, name: str, table: Mapping[str, T], *, error: type[LpconvError] = UsageError) -> T:
    """Return `table[name]`. An unknown name raises `error` with the nearest known name, or all names, as its hint."""
    if name in table:
        return table[name]
    near = nearest(name, table)
    ours = next((typed for theirs, typed in _ELSEWHERE.items() if name.casefold().startswith(theirs)), None)
    hint = ours or (f"did you mean `{near}`?" if near else "known: " + (", ".join(table) or "none"))
    raise error(f"unknown {what} `{name}`", hint=hint)


def nearest_name(part: str, names: Iterable[str]) -> str | None:
    """The dotted name most similar to `part`, or else the first with a component similar to it, or None."""
    names = list(names)
    pieces = {piece: name for name in reversed(names) for piece in name.split(".")}
    near = nearest(part, pieces)
    return nearest(part, names) or (pieces[near] if near else None)


def nearest_sibling(path: Path) -> Path | None:
    """The sibling directory whose name is most similar to a path that does not exist, or None."""
    try:
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir() and p.suffix not in _UNFINISHED]
        near = nearest(path.name, siblings)
    except OSError:  # the parent does not exist or cannot be listed
        return None
    return path.parent / near if near else None


def missing_directory(path: str | Path, *, hint: str) -> InputError:
    """Error for a path that is not a directory; its hint is the nearest directory name, or else `hint`."""
    if os.path.exists(path):  # unlike Path.exists, never raises
        return InputError(f"`{path}` is not a directory", hint=hint)
    near = nearest_sibling(Path(path))
    return InputError(f"directory `{path}` does not exist", hint=f"did you mean `{near}`?" if near else hint)
