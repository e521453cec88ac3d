"""Charts over the tensors of a model: weight RMS within the format's range, and SQNR."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from lpconv.formats.spec import CODED, FORMATS
from lpconv.report.charts import SYMBOLS, Axis, Box, Chart, Mark, Tick, number_axis, series_kind, stepped_axis
from lpconv.report.numbers import format_text, name_list, number_text, plural, scale_text, share_text, sqnr_text
from lpconv.report.tensors import converted_tensors, in_layer_order, layer_groups, modules_of, output_errors
from lpconv.results import ComparedTensor, ConvertResult, TensorRecord

# Displayed part of a format's range; fp32 and bf16 reach to 2^±127, far beyond any weight.
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -32, 20
_RANGES = FORMATS.keys() - {CODED.name}  # formats with a range that limits codes
_MAX_DECIBELS = 10_000  # more than the range of fp64; values beyond are drawn at the end of the axis
# The marks of the chart of magnitudes, as in its legend.
_BEFORE = Mark(kind="before", shape="circle", title="RMS in the source")
_AFTER = Mark(kind="after", shape="circle", title="RMS as stored")
_PEAK = Mark(kind="peak", shape="dash", title="largest element as stored")

_Measured: TypeAlias = TensorRecord | ComparedTensor


def rms_chart(result: ConvertResult, title: str = "") -> Chart | None:
    """Weight RMS before and after as binary exponents, within the range of each tensor's format.

    Before is the RMS of the source; after is the RMS of the codes, rms / scale. None if nothing was measured, or if
    tensors have many scales, so that no single number describes their codes. `title` replaces the default title.
    """
    if result.has_finer_scales or any(t.points for t in result.tensors):
        return None
    tensors = [t for t in in_layer_order(converted_tensors(result.tensors)) if _as_stored(t, t.rms)]
    if not tensors:
        return None
    scaled = any(t.scale for t in tensors)
    own = "Weight RMS before and after, against the format's range" if scaled else "Weight RMS in the format"
    return Chart(
        title=title or own,
        description=_rms_words(tensors),
        x=_column_axis(tensors, "converted tensors, by layer"),
        y=_exponent_axis(tensors),
        boxes=tuple(_range_boxes(tensors)),
        marks=tuple(mark for i, t in enumerate(tensors) for mark in _rms_marks(t, i + 0.5)),
        legend=(*([_BEFORE] if scaled else []), _AFTER, *([_PEAK] if any(t.absmax for t in tensors) else [])),
        dividers=_module_dividers(tensors),
        is_wide=True,
    )


def _as_stored(t: TensorRecord, magnitude: float | None) -> float | None:
    """A magnitude of the source on the scale of the codes; None unless it is positive and finite."""
    if magnitude is None or t.scale == 0:
        return None
    code = magnitude / t.scale if t.scale else magnitude
    return code if 0 < magnitude < math.inf and 0 < code < math.inf else None


def _rms_marks(t: TensorRecord, x: float) -> Iterator[Mark]:
    before, after, peak = t.rms, _as_stored(t, t.rms), _as_stored(t, t.absmax)
    if t.scale and before and after:
        points = ((x, math.log2(before)), (x, math.log2(after)))
        yield Mark(kind="move", shape="line", points=points)
        yield replace(_BEFORE, title=f"{t.name}: {_BEFORE.title}", points=points[:1])
    if after:
        yield replace(
            _AFTER, title=f"{t.name}: {_AFTER.title}, {format_text(t.format)}", points=((x, math.log2(after)),)
        )
    if peak:
        yield replace(_PEAK, title=f"{t.name}: {_PEAK.title}, {format_text(t.format)}", points=((x, math.log2(peak)),))


def _exponent_axis(tensors: Sequence[TensorRecord]) -> Axis:
    held = [FORMATS[f] for f in {t.format for t in tensors} & _RANGES]
    magnitudes = [v for t in tensors for v in (t.rms, _as_stored(t, t.rms), _as_stored(t, t.absmax)) if v]
    edges = [max(math.log2(r.min_subnormal), _LOWEST_EXPONENT) for r in held]
    edges += [min(math.log2(r.max), _HIGHEST_EXPONENT) for r in held]
    exponents = edges + [math.log2(v) for v in magnitudes]
    # Some room beyond both ends of the range, so that outliers are visible.
    low, high = math.floor(min(exponents)) - 2, math.ceil(max(exponents)) + 2
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 200, 500) if (high - low) / s <= 10)
    return stepped_axis(low, high, step, lambda e: f"2^{e}", "magnitude")


def _range_boxes(tensors: Sequence[TensorRecord]) -> Iterator[Box]:
    """Boxes of normal and subnormal numbers for each run of neighbouring tensors with the same format."""
    first = 0
    for name, members in groupby(tensors, key=lambda t: t.format):
        last = first + len(list(members))
        if name in _RANGES:
            held = FORMATS[name]
            low, middle, high = map(math.log2, (held.min_subnormal, held.min_normal, held.max))
            yield Box(kind="normal", x=(first, last), y=(middle, high), label=f"{name}: normal numbers")
            yield Box(kind="subnormal", x=(first, last), y=(low, middle), label=f"{name}: subnormal")
        first = last


def _rms_words(tensors: Sequence[TensorRecord]) -> str:
    before = statistics.median([t.rms for t in tensors if t.rms])
    after = statistics.median([code for t in tensors if (code := _as_stored(t, t.rms))])
    if any(t.scale for t in tensors):
        moved = f"from {number_text(before)} in the source to {number_text(after)} in the codes"
        words = f"The median weight RMS changes {moved}."
    else:
        words = f"The median weight RMS is {number_text(before)}; the values are stored without a scale."
    held = sorted({t.format for t in tensors} & _RANGES)
    starts = [f"{name} from {scale_text(FORMATS[name].min_normal)} to {FORMATS[name].max:.5g}" for name in held]
    return f"{words} Normal numbers: {', '.join(starts)}." if starts else words


def sqnr_chart(runs: Sequence[tuple[str, Sequence[_Measured]]], *, noun: str = "converted tensor") -> Chart | None:
    """The SQNR of every tensor, one series per named run; None if none was measured.

    Tensors are in layer order over all runs. Tensors without any error are on the top line, "exact".
    """
    measured = {name: {t.name: t for t in tensors if _is_number(t.sqnr_db)} for name, tensors in runs}
    tensors = in_layer_order({n: t for run in measured.values() for n, t in run.items()}.values())
    if not tensors:
        return None
    axis, exact = _decibel_axis([d for run in measured.values() for d in _decibels(run)])
    places = {t.name: i + 0.5 for i, t in enumerate(tensors)}
    # Runs are side by side within a tensor's column: equal values would otherwise hide all runs but the last.
    asides = [0.7 * ((i + 0.5) / len(runs) - 0.5) for i in range(len(runs))]
    marks = (
        _sqnr_mark(t, i, places[t.name] + asides[i], exact, run if len(runs) > 1 else "")
        for i, (run, members) in enumerate(measured.items())
        for t in members.values()
    )
    legend = tuple(Mark(kind=series_kind(i), shape=_symbol(i), title=run) for i, run in enumerate(measured))
    return Chart(
        title=f"Signal-to-noise ratio of every {noun}",
        description=_sqnr_words(measured, noun),
        x=_column_axis(tensors, f"{noun}s, by layer"),
        y=axis,
        marks=tuple(marks),
        legend=legend if len(runs) > 1 else (),
        dividers=_module_dividers(tensors),
        is_wide=True,
    )


def feedback_chart(tensors: Sequence[TensorRecord]) -> Chart | None:
    """The mean output error of each module, to nearest and with error feedback; None without error feedback."""
    errors = {m: e for m, group in layer_groups(tensors).items() if (e := output_errors(t.rounding for t in group))}
    whole = output_errors(t.rounding for t in tensors)
    if whole is None:
        return None
    nearest = Mark(kind="series-0", shape="circle", title="to nearest")
    feedback = Mark(kind="series-1", shape="square", title="with error feedback")
    marks = []
    for i, (module, (before, after)) in enumerate(errors.items()):
        ends = ((i + 0.5, before), (i + 0.5, after))
        marks.append(Mark(kind="move", shape="line", points=ends))
        marks += [replace(m, title=module, points=(p,)) for m, p in zip((nearest, feedback), ends, strict=True)]
    return Chart(
        title="Output error of each layer",
        description="Mean squared error of layer outputs on the calibration text, relative to their size. Lower is "
        f"better. Over all layers, {share_text(whole[0], 1)} is lost to nearest and {share_text(whole[1], 1)} with "
        "error feedback.",
        x=Axis(
            low=0,
            high=len(errors),
            label="layer",
            ticks=tuple(Tick(at=i + 0.5, label=m.rpartition(".")[2], has_line=False) for i, m in enumerate(errors)),
        ),
        y=number_axis(0.0, 1.05 * max(max(e) for e in errors.values()) or 1.0, text=lambda e: share_text(e, 1)),
        marks=tuple(marks),
        legend=(nearest, feedback),
    )


def flat_sqnr_text(tensors: Sequence[TensorRecord]) -> str:
    """A sentence with the SQNR range of each format, if a chart would show no more: no range exceeds 1 dB."""
    measured = sorted((t for t in tensors if _is_number(t.sqnr_db)), key=lambda t: t.format or "")
    ranges = []
    for name, members in groupby(measured, lambda t: t.format):
        decibels = [t.sqnr_db or 0.0 for t in members]
        least, most = min(decibels), max(decibels)
        if least != most and not most - least <= 1:  # the difference of two infinities is NaN
            return ""
        start = "" if least == most else f"{sqnr_text(least)} to "
        ranges.append(f"{start}{sqnr_text(most, ' dB')} in {plural(len(decibels), 'tensor')} of {format_text(name)}")
    return f"Signal-to-noise ratios are close together: {name_list(ranges)}." if ranges else ""


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _decibels(run: Mapping[str, _Measured]) -> list[float]:
    return [t.sqnr_db for t in run.values() if t.sqnr_db is not None]


def _decibel_axis(decibels: Sequence[float]) -> tuple[Axis, float]:
    """An axis around the finite values, at least 10 dB long, and the y value of exact tensors.

    That value is above the finite ones, and is on the axis only if there is an exact tensor.
    """
    finite = [d for d in decibels if abs(d) <= _MAX_DECIBELS]
    if not finite:
        return stepped_axis(0.5, 1.5, 1, lambda _: "exact", ""), 1  # a title would hide the only label
    span = max(finite) - min(finite)
    margin = max((10 - span) / 2, span / 20)
    step = next((s for s in (2, 5, 10, 20, 50) if (span + 2 * margin) / s <= 8), 100)
    low, high = math.floor((min(finite) - margin) / step) * step, math.ceil((max(finite) + margin) / step) * step
    exact, top = high + step, high + 1.4 * step if math.inf in decibels else high
    return stepped_axis(low, top, step, lambda d: "exact" if d == exact else str(d), "SQNR, dB"), exact


def turned_chart(tensors: Sequence[ComparedTensor]) -> Chart | None:
    """The share of codes of each weight that are not the nearest to the source; None if all are."""
    judged = [t for t in in_layer_order(tensors) if t.rounding]
    checks = [t.rounding for t in judged if t.rounding]
    largest = max((c.turned for c in checks), default=0.0)
    if not largest:
        return None
    kinds = [int(bool(c.unusual)) for c in checks]
    words = ("weight", "weight unlike its siblings")
    return Chart(
        title="Codes that are not the nearest to the source",
        description=f"Share of the codes of each weight, up to {share_text(largest, 1)}.",
        x=_column_axis(judged, "weights, by layer"),
        y=number_axis(0.0, 1.05 * largest, text=lambda share: share_text(share, 1)),
        marks=tuple(
            Mark(kind=series_kind(k), shape=_symbol(k), points=((i + 0.5, c.turned),), title=t.name)
            for i, (t, c, k) in enumerate(zip(judged, checks, kinds, strict=True))
        ),
        legend=tuple(Mark(kind=series_kind(k), shape=_symbol(k), title=words[k]) for k in sorted(set(kinds))),
        dividers=_module_dividers(judged),
        is_wide=True,
    )


def _symbol(series: int) -> str:
    return SYMBOLS[series % len(SYMBOLS)]


def _sqnr_mark(t: _Measured, series: int, x: float, exact: float, run: str) -> Mark:
    place = f"{run}: {t.name}" if run else t.name
    stored = format_text(t.format) if isinstance(t, TensorRecord) else t.stored_as
    title = f"{place}: {sqnr_text(t.sqnr_db, ' dB')}, {stored}"
    # An SQNR of -inf (elements became Inf) is drawn at the low end.
    y = max(min(t.sqnr_db or 0.0, exact), -1e9)
    return Mark(kind=series_kind(series), shape=_symbol(series), points=((x, y),), title=title)


def _sqnr_words(measured: Mapping[str, Mapping[str, _Measured]], noun: str) -> str:
    """The lowest and the median SQNR of each run."""
    words = []
    for run, members in measured.items():
        decibels, figures = _decibels(members), "not measured"
        if decibels:
            lowest, median = min(decibels), statistics.median(decibels)
            figures = f"lowest {sqnr_text(lowest, ' dB')}, median {sqnr_text(median, ' dB')}"
        words.append(f"{run if len(measured) > 1 else f'Over the {noun}s'}: {figures}.")
    return " ".join(words)


def _column_axis(tensors: Sequence[_Measured], label: str) -> Axis:
    """An axis with a column per tensor, labelled by module: layer numbers first, then names that still fit."""
    groups = sorted(_module_columns(tensors), key=lambda m: not m[0].rpartition(".")[2].isdecimal())
    ticks = (Tick(at=(first + last) / 2, label=module.rpartition(".")[2]) for module, first, last in groups)
    return Axis(low=0, high=len(tensors), label=label, ticks=tuple(ticks))


def _module_dividers(tensors: Sequence[_Measured]) -> tuple[float, ...]:
    return tuple(first for _, first, _ in _module_columns(tensors) if first > 0)


def _module_columns(tensors: Sequence[_Measured]) -> list[tuple[str, int, int]]:
    """(module, first column, end column) for each run of tensors of one module."""
    modules = modules_of([t.name for t in tensors])
    runs = groupby(range(len(tensors)), key=lambda i: modules[tensors[i].name])
    places = [(module, list(columns)) for module, columns in runs]
    return [(module, columns[0], columns[-1] + 1) for module, columns in places]
