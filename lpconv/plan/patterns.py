"""Patterns of tensor names, and rules that give matching tensors a format."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lpconv.errors import UsageError
from lpconv.formats.spec import get_format
from lpconv.lookup import nearest_name


@dataclass(frozen=True, kw_only=True)
class FormatRule:
    """Tensors whose name matches `pattern` get `format`, or stay as they are if it is ``keep``."""

    pattern: str
    format: str

    def __str__(self) -> str:
        return f"{self.pattern}={self.format}"


def parse_rule(text: str) -> FormatRule:
    """Parse ``PATTERN=FORMAT``; FORMAT may be ``keep``. The last ``=`` separates."""
    pattern, separator, name = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"rule `{text}` is not PATTERN=FORMAT", hint="for example --rule 'lm_head*=keep'")
    if name != "keep":
        get_format(name)
    return FormatRule(pattern=pattern, format=name)


def check_pattern(pattern: str) -> None:
    """Raise UsageError if a pattern after ``re:`` is not a valid regular expression."""
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as e:
        raise UsageError(
            f"pattern `{pattern}` is not a valid regular expression: {e}", hint="escape dots as \\."
        ) from e


def check_matches(pattern: str, names: Iterable[str]) -> None:
    """Raise UsageError, with the nearest name, unless the pattern matches a tensor. Catches typos."""
    names = list(names)
    if any(matches(pattern, n) for n in names):
        return
    near = nearest_name(pattern.removeprefix("re:").strip("*.^$"), names)
    hint = f"did you mean `{near}`?" if near else "`lpconv inspect MODEL --all` lists the names"
    raise UsageError(f"pattern `{pattern}` matches no tensor", hint=hint)


def matches(pattern: str, name: str) -> bool:
    """Whether a tensor name matches a pattern: a glob over the whole name, or ``re:`` and an expression within it."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)
