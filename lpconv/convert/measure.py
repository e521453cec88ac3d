"""The first pass over a scaled tensor: its statistics, and from them its scale or the points of its rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.convert.encode import BlockStats, Workspace, block_stats, fit_points, fits_exactly, scale_for
from lpconv.convert.plan import POINTS_SUFFIX, SCALE_SUFFIX, Plan, PlannedTensor
from lpconv.convert.workers import Workers
from lpconv.errors import InputError
from lpconv.mcf.multipoint import Fit, Points
from lpconv.progress import Progress

__all__ = ["Measured", "measure"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the first pass finds: statistics, and either one scale or the points of every row."""

    stats: BlockStats
    scale: float | None = None
    points: Points | None = None

    def stored(self, name: str) -> dict[str, bytes]:
        """The tensors that stand before the codes of `name`, by name."""
        if self.points is None:
            return {name + SCALE_SUFFIX: torch.tensor([self.scale], dtype=torch.float32).numpy().tobytes()}
        return {
            name + SCALE_SUFFIX: self.points.scales_P.numpy().tobytes(),
            name + POINTS_SUFFIX: self.points.counts_R.numpy().tobytes(),
        }


def measure(plan: Plan, t: PlannedTensor, workers: Workers, progress: Progress) -> Measured:
    """Read a tensor that gets scales. Raises InputError where it has NaN or Inf and its rows should become points."""
    if t.points is not None:
        return _fit(plan, t, workers, progress)
    stats = BlockStats()
    for block, found in workers.over(t, block_stats):
        stats = stats + found
        progress.advance(block.source_bytes)
    return Measured(stats=stats, scale=_scale(plan, t, stats, workers))


def _fit(plan: Plan, t: PlannedTensor, workers: Workers, progress: Progress) -> Measured:
    layout, most = t.points, plan.options.points_max
    assert layout is not None
    assert most is not None

    def fit(x: Tensor, work: Workspace) -> tuple[BlockStats, Fit]:
        stats = block_stats(x, work)
        if stats.num_nan or stats.num_inf:
            raise InputError(
                f"tensor `{t.name}` has NaN or Inf, which no sum of {layout.element.name} numbers is",
                hint=f"keep it with --exclude '{t.name}'",
            )
        return stats, fit_points(x, layout, most, work)

    total, fits = BlockStats(), []
    for block, (stats, found) in workers.over(t, fit):
        total = total + stats
        fits.append(found)
        progress.advance(block.source_bytes)
    return Measured(stats=total, points=Fit.of_blocks(fits).allot(layout.num_points))


def _scale(plan: Plan, t: PlannedTensor, stats: BlockStats, workers: Workers) -> float:
    assert t.format is not None
    rounding = plan.method.scale_rounding if plan.options.scale == "pow2" else "exact"
    scale = scale_for(stats, t.format, rounding)
    # fp32 codes promise the source's bits back; dividing tiny elements by a large scale could lose some.
    if t.format.name == "fp32" and rounding != "exact" and scale > 1 and not _survives(t, scale, workers):
        return 1.0
    return scale


def _survives(t: PlannedTensor, scale: float, workers: Workers) -> bool:
    """Whether every element comes back from its fp32 code."""
    return all(ok for _, ok in workers.over(t, lambda x, work: fits_exactly(x, scale, work)))
