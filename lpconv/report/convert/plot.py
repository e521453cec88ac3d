"""The plots of conversions over their tensors: weight RMS against what the format holds, and signal-to-noise ratios."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

from lpconv.report.numbers import listed, number_text, plural, scale_text, sqnr_text
from lpconv.report.plot import (
    CHARACTER,
    NUM_SHAPES,
    Axis,
    Band,
    FormatRange,
    Mark,
    Plot,
    Tick,
    column_x,
    dash_path,
    mark_path,
    mark_radius,
)
from lpconv.report.tensors import converted, has_finer_scales, in_layer_order, modules_of
from lpconv.results import ComparedTensor, ConvertResult, TensorRecord

_LABEL_GAP = 10.0  # keeps labels apart, in page units
# The part of a format's range that is shown; fp32 and bf16 reach to 2^±127, where no weight lies.
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -32, 20
_LABEL_HEIGHT = 18

_Measured: TypeAlias = TensorRecord | ComparedTensor


def rms_plot(result: ConvertResult, ranges: Mapping[str, FormatRange]) -> Plot | None:
    """Weight RMS before and after, each tensor over the range of the format it is stored in.

    Before is the RMS of the source; after is the RMS of the codes, rms / scale. None where nothing was measured, and
    where a tensor has many scales, so that no number says where its codes lie.
    """
    if has_finer_scales(result):
        return None
    tensors = [t for t in in_layer_order(converted(result.tensors)) if _as_stored(t, t.rms)]
    if not tensors:
        return None
    axis, radius, count = _exponent_axis(tensors, ranges), mark_radius(len(tensors)), len(tensors)
    marks = [m for i, t in enumerate(tensors) for m in _rms_marks(t, column_x(i + 0.5, count), axis, radius)]
    scaled = any(t.scale for t in tensors)
    return Plot(
        name="rms",
        title="Weight RMS before and after, against the format's range" if scaled else "Weight RMS in the format",
        description=_rms_words(tensors, ranges),
        x_label="converted tensors, by layer",
        y_label="magnitude",
        x_ticks=_module_ticks(tensors),
        y_ticks=_exponent_ticks(axis),
        bands=_range_bands(tensors, ranges, axis),
        marks=tuple(marks),
        legend=_rms_legend(tensors),
        dividers=_module_dividers(tensors),
    )


def _as_stored(t: TensorRecord, magnitude: float | None) -> float | None:
    """A magnitude of the source as the codes hold it; None unless it is a positive number, which a logarithm needs.

    None for tensors of points, too: each of their rows has scales of its own.
    """
    if magnitude is None or t.scale == 0 or t.points:
        return None
    code = magnitude / t.scale if t.scale else magnitude
    return code if 0 < magnitude < math.inf and 0 < code < math.inf else None


def _rms_marks(t: TensorRecord, x: float, axis: Axis, r: float) -> Iterable[Mark]:
    before, after, peak = t.rms, _as_stored(t, t.rms), _as_stored(t, t.absmax)
    if t.scale and before and after:
        y0, y1 = axis.at(math.log2(before)), axis.at(math.log2(after))
        yield Mark(kind="move", path=f"M{x} {y0}V{y1}", title="")
        yield Mark(kind="before", path=mark_path(0, x, y0, r), title=f"{t.name}: RMS in the source")
    if after:
        title = f"{t.name}: RMS as stored, {t.format}"
        yield Mark(kind="after", path=mark_path(0, x, axis.at(math.log2(after)), r), title=title)
    if peak:
        title = f"{t.name}: largest element as stored, {t.format}"
        yield Mark(kind="peak", path=dash_path(x, axis.at(math.log2(peak)), r), title=title)


def _rms_legend(tensors: Sequence[TensorRecord]) -> tuple[Mark, ...]:
    entries = [Mark(kind="after", path=mark_path(0, 7, 7, 4), title="RMS as stored")]
    if any(t.scale for t in tensors):
        entries.insert(0, Mark(kind="before", path=mark_path(0, 7, 7, 4), title="RMS in the source"))
    if any(t.absmax for t in tensors):
        entries.append(Mark(kind="peak", path=dash_path(7, 7, 5), title="largest element as stored"))
    return tuple(entries)


def _exponent_axis(tensors: Sequence[TensorRecord], ranges: Mapping[str, FormatRange]) -> Axis:
    held = [ranges[f] for f in {t.format for t in tensors} if f in ranges]
    magnitudes = [v for t in tensors for v in (t.rms, _as_stored(t, t.rms), _as_stored(t, t.absmax)) if v]
    edges = [max(math.log2(r.min_subnormal), _LOWEST_EXPONENT) for r in held]
    edges += [min(math.log2(r.max), _HIGHEST_EXPONENT) for r in held]
    exponents = edges + [math.log2(v) for v in magnitudes]
    # A little room beyond both ends of the range, so that what lies outside is seen to.
    return Axis(low=math.floor(min(exponents)) - 2, high=math.ceil(max(exponents)) + 2)


def _exponent_ticks(axis: Axis) -> tuple[Tick, ...]:
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100) if (axis.high - axis.low) / s <= 10)
    return axis.ticks(step, lambda e: f"2^{e}")


def _range_bands(tensors: Sequence[TensorRecord], ranges: Mapping[str, FormatRange], axis: Axis) -> tuple[Band, ...]:
    """The normal and subnormal numbers of each run of neighbours that share a format."""
    bands: list[Band] = []
    first = 0
    for name, members in groupby(tensors, key=lambda t: t.format):
        last = first + len(list(members))
        if name in ranges:
            left, right = column_x(first, len(tensors)), column_x(last, len(tensors))
            bands += _bands_of(name, ranges[name], axis, left, right)
        first = last
    return tuple(bands)


def _bands_of(name: str, held: FormatRange, axis: Axis, left: float, right: float) -> list[Band]:
    top, middle, bottom = (axis.at(math.log2(v)) for v in (held.max, held.min_normal, held.min_subnormal))
    spans = (("normal", f"{name}: normal numbers", top, middle), ("subnormal", f"{name}: subnormal", middle, bottom))
    return [
        Band(
            kind=kind,
            x=left,
            y=y0,
            width=round(right - left, 1),
            height=round(y1 - y0, 1),
            label=label if len(label) * CHARACTER < right - left and y1 - y0 > _LABEL_HEIGHT else "",
        )
        for kind, label, y0, y1 in spans
        if y1 > y0
    ]


def _rms_words(tensors: Sequence[TensorRecord], ranges: Mapping[str, FormatRange]) -> str:
    before = statistics.median([t.rms for t in tensors if t.rms])
    after = statistics.median([code for t in tensors if (code := _as_stored(t, t.rms))])
    if any(t.scale for t in tensors):
        moved = f"from {number_text(before)} in the source to {number_text(after)} in the codes"
        words = f"The median weight RMS moves {moved}."
    else:
        words = f"The median weight RMS is {number_text(before)}; the values are stored without a scale."
    held = sorted({t.format for t in tensors} & ranges.keys())
    starts = [f"{name} from {scale_text(ranges[name].min_normal)} to {ranges[name].max:.5g}" for name in held]
    return f"{words} Normal numbers: {', '.join(starts)}." if starts else words


def sqnr_plot(runs: Sequence[tuple[str, Sequence[_Measured]]], *, of: str = "converted tensor") -> Plot | None:
    """The signal-to-noise ratio of every tensor, one series for each named run; None if none was measured.

    Tensors stand in layer order of all runs together. Those without any noise lie on the top line, "exact". `of` is
    what they are, in words.
    """
    measured = {name: {t.name: t for t in tensors if _is_number(t.sqnr_db)} for name, tensors in runs}
    tensors = in_layer_order({n: t for run in measured.values() for n, t in run.items()}.values())
    if not tensors:
        return None
    # Runs stand side by side in a tensor's column: equal figures would hide all runs but the last.
    places = {t.name: i + 0.5 for i, t in enumerate(tensors)}
    asides = [0.7 * ((i + 0.5) / len(runs) - 0.5) for i in range(len(runs))]
    axis, step, exact = _decibel_axis([d for run in measured.values() for d in _decibels(run)])
    radius = mark_radius(len(tensors))
    marks = [
        _sqnr_mark(
            t,
            i,
            column_x(places[t.name] + asides[i], len(tensors)),
            axis.at(min(t.sqnr_db or 0.0, exact)),
            radius,
            run if len(runs) > 1 else "",
        )
        for i, (run, members) in enumerate(measured.items())
        for t in members.values()
    ]
    return Plot(
        name="sqnr",
        title=f"Signal-to-noise ratio of every {of}",
        description=_sqnr_words(measured, of),
        x_label=f"{of}s, by layer",
        y_label="SQNR, dB",
        x_ticks=_module_ticks(tensors),
        y_ticks=axis.ticks(step, lambda decibels: "exact" if decibels == exact else str(decibels)),
        marks=tuple(marks),
        legend=_sqnr_legend(list(measured)),
        dividers=_module_dividers(tensors),
    )


def flat_words(tensors: Sequence[TensorRecord]) -> str:
    """The range of SQNR of each format in a sentence, if that says as much as a plot: none spans more than 1 dB."""
    measured = sorted((t for t in tensors if _is_number(t.sqnr_db)), key=lambda t: t.format or "")
    ranges = []
    for name, members in groupby(measured, lambda t: t.format):
        decibels = [t.sqnr_db or 0.0 for t in members]
        least, most = min(decibels), max(decibels)
        if not most - least <= 1:  # two infinite ones make NaN
            return ""
        to = "" if least == most else f" to {sqnr_text(most)}"
        ranges.append(f"{sqnr_text(least)}{to} dB in {plural(len(decibels), 'tensor')} of {name}")
    return f"Signal-to-noise ratios lie close together: {listed(ranges)}." if ranges else ""


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _decibels(run: Mapping[str, _Measured]) -> list[float]:
    return [t.sqnr_db for t in run.values() if t.sqnr_db is not None]


def _decibel_axis(decibels: Sequence[float]) -> tuple[Axis, int, int]:
    """An axis around the finite values, never less than 10 dB in all; its round step; the line of exact tensors.

    That line lies above the finite values, and on the axis only where there is such a tensor.
    """
    exact = math.inf in decibels
    finite = [d for d in decibels if math.isfinite(d)]
    if not finite:
        return Axis(low=0.5, high=1.5), 1, 1
    span = max(finite) - min(finite)
    margin = max((10 - span) / 2, span / 20)
    step = next((s for s in (2, 5, 10, 20, 50) if (span + 2 * margin) / s <= 8), 100)
    low, high = math.floor((min(finite) - margin) / step) * step, math.ceil((max(finite) + margin) / step) * step
    return Axis(low=low, high=high + 1.4 * step if exact else high), step, high + step


def _sqnr_mark(t: _Measured, series: int, x: float, y: float, r: float, run: str) -> Mark:
    place = f"{run}: {t.name}" if run else t.name
    stored = t.format if isinstance(t, TensorRecord) else t.stored_as
    title = f"{place}: {sqnr_text(t.sqnr_db, ' dB')}, {stored}"
    return Mark(kind=f"series-{series % NUM_SHAPES}", path=mark_path(series, x, y, r), title=title)


def _sqnr_legend(runs: Sequence[str]) -> tuple[Mark, ...]:
    if len(runs) < 2:
        return ()
    return tuple(
        Mark(kind=f"series-{i % NUM_SHAPES}", path=mark_path(i, 7, 7, 4), title=run) for i, run in enumerate(runs)
    )


def _sqnr_words(measured: Mapping[str, Mapping[str, _Measured]], of: str) -> str:
    return " ".join(
        _run_words(run if len(measured) > 1 else f"Over the {of}s", _decibels(members))
        for run, members in measured.items()
    )


def _run_words(run: str, decibels: Sequence[float]) -> str:
    if not decibels:
        return f"{run}: not measured."
    lowest, median = sqnr_text(min(decibels), " dB"), sqnr_text(statistics.median(decibels), " dB")
    return f"{run}: lowest {lowest}, median {median}."


def _module_ticks(tensors: Sequence[_Measured]) -> tuple[Tick, ...]:
    """A label in the middle of each module's columns: layer numbers first, then the names that still find room."""
    ticks: list[Tick] = []
    left, right = column_x(0, 1), column_x(1, 1)
    taken: list[tuple[float, float]] = []
    for module, first, last in sorted(_module_columns(tensors), key=lambda m: not _is_layer_number(m[0])):
        label = module.rpartition(".")[2]
        half = len(label) * CHARACTER / 2
        centre = column_x((first + last) / 2, len(tensors))
        centre = min(max(centre, left + half), right - half)
        if all(centre + half + _LABEL_GAP <= start or centre - half - _LABEL_GAP >= end for start, end in taken):
            ticks.append(Tick(position=round(centre, 1), label=label))
            taken.append((centre - half, centre + half))
    return tuple(ticks)


def _is_layer_number(module: str) -> bool:
    return module.rpartition(".")[2].isdecimal()


def _module_dividers(tensors: Sequence[_Measured]) -> tuple[float, ...]:
    """The places between neighbouring modules."""
    return tuple(column_x(first, len(tensors)) for _, first, _ in _module_columns(tensors) if first > 0)


def _module_columns(tensors: Sequence[_Measured]) -> list[tuple[str, int, int]]:
    """Each run of tensors of one module: its name, its first column and the one after its last."""
    modules = modules_of([t.name for t in tensors])
    runs = groupby(range(len(tensors)), key=lambda i: modules[tensors[i].name])
    places = [(module, list(columns)) for module, columns in runs]
    return [(module, columns[0], columns[-1] + 1) for module, columns in places]
