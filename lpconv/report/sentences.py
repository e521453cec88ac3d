"""Parts of sentences that reports and messages share."""

from collections.abc import Sequence

__all__ = ["listed"]

# The most names that a sentence lists before it says "and N more".
_NAMES = 3


def listed(items: Sequence[str]) -> str:
    """The first names of a list, and how many more there are: "a, b, c and 4 more"."""
    shown = ", ".join(items[:_NAMES])
    return f"{shown} and {len(items) - _NAMES} more" if len(items) > _NAMES else shown
