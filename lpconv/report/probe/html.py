"""The page of a probe: where the numbers lie, what each format would lose, and the table of every tensor."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lpconv.report.heat import Heatmap, Loss, loss_map
from lpconv.report.numbers import number_text, share_text, sqnr_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import Axis, Band, FormatRange, Tick
from lpconv.report.printable import printable_record
from lpconv.report.probe.words import (
    ALONE_WORDS,
    FIT_WORDS,
    LOSS_SCALE_COLUMNS,
    capped_words,
    fit_rows,
    held_by,
    loss_scale_rows,
    loss_scale_text,
)
from lpconv.results import FormatRates, ProbedRecord, ProbeReport

__all__ = ["ExponentPlot", "Strip", "exponent_plots", "heatmap", "html_probe"]

# Page units of a histogram: two stand side by side.
_WIDTH, _LEFT, _RIGHT, _TOP, _BASE = 490.0, 66.0, 482.0, 12.0, 150.0
_STRIP_HEIGHT, _STRIP_GAP, _STRIP_OFFSET = 15.0, 4.0, 11.0
_ROOM = 2  # binades left free beyond the values on either side
_MIN_BINADES = 24
_MAX_BELOW_AXIS = 1e-3  # of the elements of a class
_HEAT_HEAD = 118.0  # room for the names of the classes, in page units of the heatmap


def html_probe(report: ProbeReport, ranges: Mapping[str, FormatRange]) -> str:
    """The page of one probe. `ranges` holds what each format can hold, by the names that the report uses."""
    report = printable_record(report)
    return page(
        "probe",
        report=report,
        name=PurePath(report.name).name or report.name,
        version=None,
        tiles=_tiles(report),
        plots=exponent_plots(report, ranges),
        heat=heatmap(report),
        fits=fit_rows(report),
        fit_words=FIT_WORDS,
        held_by=held_by,
        alone_words=ALONE_WORDS,
        capped=capped_words(report),
        scale_columns=LOSS_SCALE_COLUMNS,
        scales=loss_scale_rows(report),
    )


def _tiles(report: ProbeReport) -> tuple[Tile, ...]:
    held = {name: sum(t.scaled[i].fits for t in report.tensors) for i, name in enumerate(report.formats)}
    total = len(report.tensors)
    tiles = [
        (
            f"Loss scale for {s.format}",
            loss_scale_text(s.log2_scale),
            f"worst gradient underflow {share_text(s.worst_underflow_before, 1)} at 1, "
            f"{share_text(s.worst_underflow_after, 1)} there",
        )
        for s in report.loss_scales[:1]
    ]
    tiles += [(f"Held by {name}", f"{n} of {total}", "layers and classes of tensor") for name, n in held.items()]
    cost = f"of the time of the steps, {report.steps_recorded} of {report.steps_seen} recorded"
    if report.losses:
        cost += f"; loss {' to '.join(dict.fromkeys(map(number_text, (report.losses[0], report.losses[-1]))))}"
    return (*tiles, ("Cost of recording", share_text(report.overhead, 1), cost))


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One format's window below the histogram: `bands` are its normal and subnormal numbers."""

    label: str
    y: float
    bands: tuple[Band, ...]


@dataclass(frozen=True, kw_only=True)
class ExponentPlot:
    """The histogram of one class of tensor over all layers. `outline` is where a loss scale would put it, or empty."""

    name: str
    title: str
    description: str
    bars: tuple[Band, ...]
    outline: str
    outline_label: str
    strips: tuple[Strip, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    height: float
    axis: float
    width: float = _WIDTH
    left: float = _LEFT
    right: float = _RIGHT
    base: float = _BASE
    top: float = _TOP


def exponent_plots(report: ProbeReport, ranges: Mapping[str, FormatRange]) -> tuple[ExponentPlot, ...]:
    """A histogram for each class, all on one axis of exponents, above the windows of the report's formats."""
    totals = _totals(report.tensors)
    if not totals:
        return ()
    scale = next((s for s in report.loss_scales if s.log2_scale), None)
    shift = scale.log2_scale if scale else 0
    gradients = {t.words for t in report.tensors if t.is_gradient}
    lows = [_lowest(c) + (min(shift, 0) if w in gradients else 0) for w, c in totals.items()]
    highs = [max(c) + (max(shift, 0) if w in gradients else 0) for w, c in totals.items()]
    low, high = min(lows) - _ROOM, max(highs) + 1 + _ROOM
    high = max(high, low + _MIN_BINADES)
    label = f"at loss scale {loss_scale_text(shift)}, recommended for {scale.format}" if scale else ""
    scaled = dict.fromkeys(gradients, (shift, label))
    return tuple(
        _exponent_plot(words, totals[words], (low, high), report.formats, ranges, scaled.get(words, (0, "")))
        for words in report.classes
        if words in totals
    )


def _lowest(counts: Counter[int]) -> int:
    """The exponent to begin the axis with: next to nothing lies below, and a few outliers would squeeze the rest."""
    allowed = _MAX_BELOW_AXIS * counts.total()
    seen = 0
    for e in sorted(counts):
        seen += counts[e]
        if seen > allowed:
            return e
    return min(counts)


def _totals(tensors: Sequence[ProbedRecord]) -> dict[str, Counter[int]]:
    totals: dict[str, Counter[int]] = {}
    for t in tensors:
        if t.exponents:
            totals.setdefault(t.words, Counter()).update(dict(t.exponents))
    return totals


def _exponent_plot(
    words: str,
    counts: Counter[int],
    span: tuple[int, int],
    formats: Sequence[str],
    ranges: Mapping[str, FormatRange],
    scaled: tuple[int, str],
) -> ExponentPlot:
    total, most = counts.total(), max(counts.values())
    shown = {e: n for e, n in sorted(counts.items()) if e >= span[0]}
    across, up = Axis(low=span[0], high=span[1], start=_LEFT, end=_RIGHT), Axis(low=0, high=most, start=_BASE, end=_TOP)
    x, y = across.at, up.at
    bars = tuple(
        Band(
            kind="bar",
            x=x(e),
            y=y(n),
            width=round((_RIGHT - _LEFT) / (span[1] - span[0]), 1),
            height=round(_BASE - y(n), 1),
            label=f"{share_text(n, total)} of the elements from 2^{e} up to 2^{e + 1}",
        )
        for e, n in shown.items()
    )
    shift, label = scaled
    outline = _outline([(x(e + shift), x(e + shift + 1), y(n)) for e, n in shown.items()]) if shift else ""
    strips = _strips(formats, ranges, x)
    axis = _BASE + _STRIP_OFFSET + len(strips) * (_STRIP_HEIGHT + _STRIP_GAP)
    step = next(s for s in (4, 8, 16, 32, 64) if (span[1] - span[0]) / s <= 8)
    return ExponentPlot(
        name=words.replace(" ", "-"),
        title=words[:1].upper() + words[1:],
        description=_bulk_words(counts, span[0]),
        bars=bars,
        outline=outline,
        outline_label=label if shift else "",
        strips=strips,
        x_ticks=across.ticks(step, lambda e: f"2^{e}"),
        y_ticks=(Tick(position=_TOP, label=share_text(most, total)), Tick(position=_BASE, label="0 %")),
        height=axis + 22,
        axis=axis,
    )


def _outline(steps: Sequence[tuple[float, float, float]]) -> str:
    """A staircase over the columns (left, right, top), down to the base at either end."""
    path = f"M{steps[0][0]} {_BASE}"
    for left, right, top in steps:
        path += f"L{left} {top}L{right} {top}"
    return path + f"L{steps[-1][1]} {_BASE}"


def _strips(
    formats: Sequence[str], ranges: Mapping[str, FormatRange], x: Callable[[float], float]
) -> tuple[Strip, ...]:
    strips = []
    for i, name in enumerate(formats):
        held, y = ranges[name], _BASE + _STRIP_OFFSET + i * (_STRIP_HEIGHT + _STRIP_GAP)
        edges = (("subnormal", held.min_subnormal, held.min_normal), ("normal", held.min_normal, held.max))
        bands = tuple(
            Band(
                kind=kind,
                x=x(math.log2(low)),
                y=y,
                width=round(x(math.log2(high)) - x(math.log2(low)), 1),
                height=_STRIP_HEIGHT,
                label=f"{name}, {kind} numbers: 2^{math.log2(low):.4g} to 2^{math.log2(high):.4g}",
            )
            for kind, low, high in edges
            if x(math.log2(high)) > x(math.log2(low))
        )
        strips.append(Strip(label=name, y=y, bands=bands))
    return tuple(strips)


def _bulk_words(counts: Counter[int], axis_low: int) -> str:
    """The exponents that hold 98 % of the elements, and what lies below the axis."""
    total, seen, low, high = counts.total(), 0, min(counts), max(counts)
    for e in sorted(counts):
        if seen <= 0.01 * total:
            low = e
        seen += counts[e]
        if seen >= 0.99 * total:
            high = e
            break
    below = sum(n for e, n in counts.items() if e < axis_low)
    rest = f" {share_text(below, total)} lie below the axis." if below else ""
    return f"98 % of the elements lie between 2^{low} and 2^{high + 1}.{rest}"


def heatmap(report: ProbeReport) -> Heatmap | None:
    """What is lost at loss scale 1 in each layer and class, for every format that loses anything."""
    shown = [i for i in range(len(report.formats)) if any(t.plain[i].lost > 0 for t in report.tensors)]
    if not shown:
        return None
    return loss_map(
        [_loss(t, t.plain[i], report.formats[i]) for i in shown for t in report.tensors],
        blocks=[report.formats[i] for i in shown],
        columns=report.classes,
        description=_heat_words(report, shown),
        head=_HEAT_HEAD,
    )


def _loss(t: ProbedRecord, rates: FormatRates, block: str) -> Loss:
    title = (
        f"{t.words} of {t.layer} in {rates.format}: {share_text(rates.underflow, 1)} underflow, "
        f"{share_text(rates.subnormal, 1)} subnormal, {share_text(rates.overflow, 1)} overflow, "
        f"SQNR {sqnr_text(rates.sqnr_db, ' dB')}"
    )
    return Loss(
        layer=t.layer, block=block, column=t.words, underflow=rates.underflow, overflow=rates.overflow, title=title
    )


def _heat_words(report: ProbeReport, shown: Sequence[int]) -> str:
    parts = []
    for i in shown:
        worst = max(report.tensors, key=lambda t: t.plain[i].lost)
        share = share_text(worst.plain[i].lost, 1)
        parts.append(f"{report.formats[i]}: at worst {share}, {worst.words} of {worst.layer}.")
    return " ".join(parts)
