"""The index over a folder of runs: what each was and found, and the way to its page and to those that compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lpconv.report.page import page
from lpconv.report.printable import printable, printable_record

__all__ = ["RunEntry", "html_index"]


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run of a folder. `link` is the way from the index to its page, None where it has none."""

    name: str
    kind: str
    what: str
    found: str
    link: str | None


def html_index(folder: str, entries: Sequence[RunEntry], compared: Mapping[str, str]) -> str:
    """The page of a folder. `compared` holds the ways to the pages that compare all runs of a kind."""
    runs = [printable_record(e) for e in entries]
    kinds = {kind: [e for e in runs if e.kind == kind] for kind in dict.fromkeys(e.kind for e in runs)}
    return page("index", folder=printable(folder), version=None, kinds=kinds, compared=compared)
