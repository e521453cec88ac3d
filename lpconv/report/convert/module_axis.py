"""The axis of a plot with a column for each tensor: labels and dividers of the modules that the tensors belong to."""

from collections.abc import Sequence
from itertools import groupby

from lpconv.report.convert.grouping import modules_of
from lpconv.report.plot import CHARACTER, Tick, column_x
from lpconv.results import TensorRecord

__all__ = ["module_dividers", "module_ticks"]

_LABEL_GAP = 10.0  # keeps labels apart, in page units


def module_ticks(tensors: Sequence[TensorRecord]) -> tuple[Tick, ...]:
    """A label in the middle of each module's columns: layer numbers first, then the names that still find room."""
    ticks: list[Tick] = []
    left, right = column_x(0, 1), column_x(1, 1)
    taken: list[tuple[float, float]] = []
    for module, first, last in sorted(_module_columns(tensors), key=lambda m: not _is_number(m[0])):
        label = module.rpartition(".")[2]
        half = len(label) * CHARACTER / 2
        centre = column_x((first + last) / 2, len(tensors))
        centre = min(max(centre, left + half), right - half)
        if all(centre + half + _LABEL_GAP <= start or centre - half - _LABEL_GAP >= end for start, end in taken):
            ticks.append(Tick(position=round(centre, 1), label=label))
            taken.append((centre - half, centre + half))
    return tuple(ticks)


def _is_number(module: str) -> bool:
    return module.rpartition(".")[2].isdecimal()


def module_dividers(tensors: Sequence[TensorRecord]) -> tuple[float, ...]:
    """The places between neighbouring modules."""
    return tuple(column_x(first, len(tensors)) for _, first, _ in _module_columns(tensors) if first > 0)


def _module_columns(tensors: Sequence[TensorRecord]) -> list[tuple[str, int, int]]:
    """Each run of tensors of one module: its name, its first column and the one after its last."""
    modules = modules_of([t.name for t in tensors])
    runs = groupby(range(len(tensors)), key=lambda i: modules[tensors[i].name])
    places = [(module, list(columns)) for module, columns in runs]
    return [(module, columns[0], columns[-1] + 1) for module, columns in places]
