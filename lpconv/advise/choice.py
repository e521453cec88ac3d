"""Check rows against the budget, and choose one: the smallest, or the one with least memory."""

import math
from collections.abc import Iterable
from dataclasses import replace

from lpconv.advise.options import Budget
from lpconv.results import AdviceRow

_ORDER = ("measured", "unmeasured", "pruned", "failed")


def judge_row(row: AdviceRow, budget: Budget) -> AdviceRow:
    """The row with `meets` set: whether it is within the budget."""
    if row.status != "measured" or row.gap is None:
        return replace(row, meets=None)
    fits = row.memory_bytes is None or budget.memory_bytes is None or row.memory_bytes <= budget.memory_bytes
    return replace(row, meets=row.gap.high <= budget.quality and fits)


def rank_rows(rows: Iterable[AdviceRow]) -> tuple[AdviceRow, ...]:
    """Rows best first, inference before training: those within the budget by cost, others by gap."""
    return tuple(sorted(rows, key=_place))


def _place(row: AdviceRow) -> tuple[object, ...]:
    status = _ORDER.index(row.status)
    gap = row.gap.high if row.gap is not None else math.inf
    value = abs(row.gap.value) if row.gap is not None else math.inf
    return row.purpose != "infer", status, not row.meets, _ranking_cost(row) if row.meets or status else 0.0, gap, value


def _ranking_cost(row: AdviceRow) -> float:
    """Cost used for ranking: bytes on disk, or bytes of memory in a step.

    It is rounded to two digits, so that noise does not decide.
    """
    taken = row.size_bytes if row.purpose == "infer" else row.memory_bytes
    return math.inf if not taken else float(f"{taken:.1e}")


def best(rows: Iterable[AdviceRow], purpose: str) -> AdviceRow | None:
    """The best row for a purpose within the budget, or None."""
    return next((r for r in rank_rows(rows) if r.purpose == purpose and r.meets), None)
