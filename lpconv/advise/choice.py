"""Which candidate is advised: the smallest, or the one that needs least memory, of those within the budget."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lpconv.advise.options import Budget
from lpconv.results import AdviceRow

_ORDER = ("measured", "unmeasured", "pruned", "failed")


def judged(row: AdviceRow, budget: Budget) -> AdviceRow:
    """The row with whether it stays within the budget."""
    if row.status != "measured" or row.gap is None:
        return replace(row, meets=None)
    fits = row.memory_bytes is None or budget.memory_bytes is None or row.memory_bytes <= budget.memory_bytes
    return replace(row, meets=row.gap.high <= budget.quality and fits)


def rank_rows(rows: Iterable[AdviceRow]) -> tuple[AdviceRow, ...]:
    """Best first, inference before training: those within the budget by what they take, others by their gap."""
    return tuple(sorted(rows, key=_place))


def _place(row: AdviceRow) -> tuple[object, ...]:
    status = _ORDER.index(row.status)
    gap = row.gap.high if row.gap is not None else math.inf
    value = abs(row.gap.value) if row.gap is not None else math.inf
    return row.purpose != "infer", status, not row.meets, _taken(row) if row.meets or status else 0.0, gap, value


def _taken(row: AdviceRow) -> float:
    """What a candidate is chosen by: bytes on disk, or of memory in a step, to two digits so that noise decides
    nothing."""
    taken = row.size_bytes if row.purpose == "infer" else row.memory_bytes
    return math.inf if not taken else float(f"{taken:.1e}")


def best(rows: Sequence[AdviceRow], purpose: str) -> AdviceRow | None:
    """The first of `ranked` rows for a purpose that stays within the budget."""
    return next((r for r in rows if r.purpose == purpose and r.meets), None)
