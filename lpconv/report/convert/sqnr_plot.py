"""The plot of every converted tensor's signal-to-noise ratio, for one run or several."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lpconv.report.convert.grouping import converted, in_layer_order
from lpconv.report.convert.module_axis import module_dividers, module_ticks
from lpconv.report.numbers import sqnr_text
from lpconv.report.plot import (
    NUM_SHAPES,
    Axis,
    LegendEntry,
    Mark,
    Plot,
    Tick,
    column_x,
    mark_path,
    mark_radius,
)
from lpconv.results import ConvertResult, TensorRecord

__all__ = ["sqnr_plot"]


def sqnr_plot(results: Sequence[tuple[str, ConvertResult]]) -> Plot | None:
    """The signal-to-noise ratio of every converted tensor, one series for each named run; None if none was measured.

    Tensors stand in layer order of all runs together. Those without any noise lie on the top line, "exact".
    """
    measured = {name: {t.name: t for t in converted(r.tensors) if _is_number(t.sqnr_db)} for name, r in results}
    tensors = in_layer_order({n: t for run in measured.values() for n, t in run.items()}.values())
    if not tensors:
        return None
    xs = {t.name: column_x(i + 0.5, len(tensors)) for i, t in enumerate(tensors)}
    axis = _decibel_axis([d for run in measured.values() for d in _decibels(run)])
    radius = mark_radius(len(tensors))
    marks = [
        _sqnr_mark(t, i, xs[t.name], axis, radius, run if len(results) > 1 else "")
        for i, (run, members) in enumerate(measured.items())
        for t in members.values()
    ]
    return Plot(
        name="sqnr",
        title="Signal-to-noise ratio of every converted tensor",
        description=_sqnr_words(measured),
        y_label="SQNR, dB",
        x_ticks=module_ticks(tensors),
        y_ticks=axis.ticks,
        bands=(),
        marks=tuple(marks),
        legend=_sqnr_legend(list(measured)),
        dividers=module_dividers(tensors),
    )


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _decibels(run: Mapping[str, TensorRecord]) -> list[float]:
    return [t.sqnr_db for t in run.values() if t.sqnr_db is not None]


@dataclass(frozen=True, kw_only=True)
class _DecibelAxis:
    """An axis of decibels with a line of its own, at the value `exact`, for tensors without noise."""

    axis: Axis
    ticks: tuple[Tick, ...]
    exact: float

    def y(self, decibels: float) -> float:
        return self.axis.y(self.exact if decibels == math.inf else decibels)


def _decibel_axis(decibels: Sequence[float]) -> _DecibelAxis:
    """Round steps around the finite values, never less than 10 dB in all, and the line of exact tensors above them."""
    exact = math.inf in decibels
    finite = [d for d in decibels if math.isfinite(d)]
    if not finite:
        axis = Axis(low=0, high=2)
        return _DecibelAxis(axis=axis, ticks=(Tick(position=axis.y(1), label="exact"),), exact=1)
    span = max(finite) - min(finite)
    margin = max((10 - span) / 2, span / 20)
    step = next((s for s in (2, 5, 10, 20, 50) if (span + 2 * margin) / s <= 8), 100)
    low, high = math.floor((min(finite) - margin) / step) * step, math.ceil((max(finite) + margin) / step) * step
    axis = Axis(low=low, high=high + 1.4 * step if exact else high)
    ticks = [Tick(position=axis.y(d), label=str(d)) for d in range(low, high + 1, step)]
    if exact:
        ticks.append(Tick(position=axis.y(high + step), label="exact"))
    return _DecibelAxis(axis=axis, ticks=tuple(ticks), exact=high + step)


def _sqnr_mark(t: TensorRecord, series: int, x: float, axis: _DecibelAxis, r: float, run: str) -> Mark:
    place = f"{run}: {t.name}" if run else t.name
    y = axis.y(t.sqnr_db or 0.0)
    title = f"{place}: {sqnr_text(t.sqnr_db, ' dB')}, {t.format}"
    return Mark(kind=f"series-{series % NUM_SHAPES}", path=mark_path(series, x, y, r), title=title)


def _sqnr_legend(runs: Sequence[str]) -> tuple[LegendEntry, ...]:
    if len(runs) < 2:
        return ()
    return tuple(
        LegendEntry(kind=f"series-{i % NUM_SHAPES}", path=mark_path(i, 7, 7, 4), label=run)
        for i, run in enumerate(runs)
    )


def _sqnr_words(measured: Mapping[str, Mapping[str, TensorRecord]]) -> str:
    return " ".join(
        _run_words(run if len(measured) > 1 else "", _decibels(members)) for run, members in measured.items()
    )


def _run_words(run: str, decibels: Sequence[float]) -> str:
    if not decibels:
        return f"{run}: not measured."
    lowest, median = sqnr_text(min(decibels), " dB"), sqnr_text(statistics.median(decibels), " dB")
    return f"{run + ': ' if run else 'Over the converted tensors: '}lowest {lowest}, median {median}."
