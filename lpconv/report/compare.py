"""Several runs of one kind side by side: their names, and a table of figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

from lpconv.report.numbers import MISSING

__all__ = ["Figure", "figures_of", "run_names"]

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the comparison: a label and its value in each run."""

    label: str
    values: tuple[str, ...]


def run_names(outputs: Sequence[str]) -> tuple[str, ...]:
    """A short name for each run: its output's last path component, numbered where two share it."""
    names = [PurePath(output).name or output for output in outputs]
    return tuple(f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, start=1))


def figures_of(results: Sequence[R], table: Mapping[str, Callable[[R], str]]) -> tuple[Figure, ...]:
    """The figures of all runs, most telling first. Rows that no run has a value for are left out."""
    rows = (Figure(label=label, values=tuple(value(r) for r in results)) for label, value in table.items())
    return tuple(row for row in rows if any(v != MISSING for v in row.values))
