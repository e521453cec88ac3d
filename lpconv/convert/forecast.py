"""Time and memory of a calibrated rounding, from its first layers, which are rounded without writing anything.

Layers of equal shape take equal time. If the first layers have another shape than most (dense layers in front of
experts), the first layer of the usual shape is measured as well, unless it comes late.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterable

from lpconv.convert.feedback import open_rounding
from lpconv.data import SELF
from lpconv.machine import peak_rss_bytes
from lpconv.models.layer_walk import Matrix
from lpconv.plan.job import Job
from lpconv.progress import Progress, counted
from lpconv.results import RoundingForecast

_MOST = 4  # layers to measure


def measure_rounding(job: Job, progress: Progress) -> RoundingForecast:
    """Open the model of a job and round its first layers. Text that the model would write is replaced by the demo's.

    Raises the errors of rounding.
    """
    if job.plan.options.calibrate == SELF:
        options = dataclasses.replace(job.plan.options, calibrate="demo")
        job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, options=options))
    started_s, seconds = time.perf_counter(), []
    progress.start("opening the model", 0)
    with open_rounding(job) as rounding:
        shapes = {t.name: t.info.shape[-2:] for t in job.plan.tensors}
        costs = [_cost(rounding.matrices(index), shapes) for index in range(len(rounding.layers))]
        opening_s = time.perf_counter() - started_s
        usual = costs.index(statistics.mode(costs))
        for index in counted(range(usual + 1 if usual < _MOST else 1), "rounding the first layers", "layers", progress):
            started_s = time.perf_counter()
            rounding.round_layer(index)
            rounding.rounded.clear()
            seconds.append(time.perf_counter() - started_s)
    return RoundingForecast(
        num_measured=len(seconds),
        layer_seconds=tuple(_scaled(seconds, costs, index) for index in range(len(costs))),
        opening_seconds=opening_s,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _cost(matrices: Iterable[Matrix], shapes: dict[str, tuple[int, ...]]) -> int:
    """Operations that grow with the weights to round: factors of their second moments, and corrections of columns."""
    sizes = (shapes[m.name] for m in matrices)
    return sum(cols**2 * (rows + cols) for rows, cols in sizes) or 1


def _scaled(seconds: list[float], costs: list[int], index: int) -> float:
    """Seconds of a layer: its own if it was measured, otherwise those of the nearest measured cost, scaled."""
    nearest = min(range(len(seconds)), key=lambda measured: (measured != index, abs(costs[measured] - costs[index])))
    return seconds[nearest] * costs[index] / costs[nearest]
