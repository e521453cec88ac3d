"""Several runs of one kind side by side: their names, and a table of figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lpconv.report.numbers import MISSING


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the comparison: a label and its value in each run."""

    label: str
    values: tuple[str, ...]


def run_names(outputs: Sequence[str]) -> tuple[str, ...]:
    """A short name for each run: its output's last path component, numbered where two share it."""
    names = [PurePath(output).name or output for output in outputs]
    return tuple(f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, start=1))


def figures_of(runs: Sequence[Mapping[str, str]]) -> tuple[Figure, ...]:
    """The figures of all runs by their labels, in the order of the first. Rows that no run has are left out."""
    labels = dict.fromkeys(label for run in runs for label in run)
    rows = (Figure(label=label, values=tuple(run.get(label, MISSING) for run in runs)) for label in labels)
    return tuple(row for row in rows if set(row.values) != {MISSING})
