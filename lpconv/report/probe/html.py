"""The page of a probe: where the numbers lie, what each format would lose, and the table of every tensor."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from lpconv.report.charts_old import Bar, bar_plot
from lpconv.report.heat import Heatmap, Loss, loss_map
from lpconv.report.numbers import number_text, share_text
from lpconv.report.page import Tile, page
from lpconv.report.plot import NARROW, Axis, Band, FormatRange, Mark, Plot, Tick, mark_path
from lpconv.report.printable import printable_record
from lpconv.report.probe.words import (
    ALONE_WORDS,
    FIT_WORDS,
    LOSS_SCALE_COLUMNS,
    answer,
    capped_words,
    fit_rows,
    held_by,
    loss_scale_rows,
    loss_scale_text,
)
from lpconv.results import FormatRates, ProbedRecord, ProbeReport

# Page units of a histogram: two stand side by side.
_LEFT, _RIGHT, _TOP, _BASE = 66.0, 470.0, 12.0, 150.0
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
        answer=answer(report),
        tiles=_tiles(report),
        held=_held_plot(report),
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
    tiles = [
        (
            f"Loss scale for {s.format}",
            loss_scale_text(s.log2_scale),
            f"worst gradient underflow {share_text(s.worst_underflow_before, 1)} at 1, "
            f"{share_text(s.worst_underflow_after, 1)} there",
        )
        for s in report.loss_scales[:1]
    ]
    cost = f"of the time of the steps, {report.steps_recorded} of {report.steps_seen} recorded"
    if report.losses:
        cost += f"; loss {' to '.join(dict.fromkeys(map(number_text, (report.losses[0], report.losses[-1]))))}"
    return (*tiles, ("Recording added", share_text(report.overhead, 1), cost))


def exponent_plots(report: ProbeReport, ranges: Mapping[str, FormatRange]) -> tuple[Plot, ...]:
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
) -> Plot:
    total, (low, high) = counts.total(), span
    shown = [(e, counts[e] / total) for e in range(max(low, min(counts)), max(counts) + 1)]
    across = Axis(low=low, high=high, start=_LEFT, end=_RIGHT)
    up = Axis(low=0, high=1.05 * max(share for _, share in shown), start=_BASE, end=_TOP)
    shift, label = scaled
    bars = tuple(_bar(across.at(e), across.at(e + 1), up.at(share)) for e, share in shown if share)
    outline = _outline([(across.at(e + shift), across.at(e + shift + 1), up.at(share)) for e, share in shown])
    legend = (
        Mark(kind="bar", path=mark_path(1, 7, 7, 5), title="elements"),
        Mark(kind="normal", path=mark_path(1, 7, 7, 5), title="normal numbers of the format"),
        Mark(kind="subnormal", path=mark_path(1, 7, 7, 5), title="subnormal ones"),
        *((Mark(kind="outline", path="M1 12V5H7V2H13V12", title=label),) if shift else ()),
    )
    ys = [_BASE + _STRIP_OFFSET + i * (_STRIP_HEIGHT + _STRIP_GAP) for i in range(len(formats))]
    named = tuple(
        Tick(position=y + _STRIP_HEIGHT / 2, label=n, has_line=False) for n, y in zip(formats, ys, strict=True)
    )
    strips = (band for n, y in zip(formats, ys, strict=True) for band in _strip(ranges[n], y, across.at))
    bottom = ys[-1] + _STRIP_HEIGHT + 4
    step = next(s for s in (4, 8, 16, 32, 64) if (high - low) / s <= 8)
    percents = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if up.high / s <= 5)
    return Plot(
        name=words.replace(" ", "-"),
        title=words[:1].upper() + words[1:],
        description=_bulk_words(counts, low),
        x_label="magnitude",
        x_ticks=across.ticks(step, lambda e: f"2^{e}"),
        y_ticks=up.ticks(percents, lambda share: f"{100 * share:.0f} %") + named,
        bands=(*bars, *strips),
        marks=(Mark(kind="outline", path=outline, title=label),) if shift else (),
        legend=legend,
        width=NARROW,
        height=bottom + 46,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=bottom,
    )


def _bar(left: float, right: float, top: float) -> Band:
    return Band(kind="bar", x=left, y=top, width=round(right - left, 1), height=round(_BASE - top, 1), label="")


def _outline(steps: Sequence[tuple[float, float, float]]) -> str:
    """A staircase over the columns (left, right, top), down to the base at either end."""
    path = f"M{steps[0][0]} {_BASE}"
    for left, right, top in steps:
        path += f"L{left} {top}L{right} {top}"
    return path + f"L{steps[-1][1]} {_BASE}"


def _strip(held: FormatRange, y: float, x: Callable[[float], float]) -> Iterator[Band]:
    """A format's window below the histogram: its subnormal and its normal numbers."""
    for kind, low, high in (("subnormal", held.min_subnormal, held.min_normal), ("normal", held.min_normal, held.max)):
        left, right = x(math.log2(low)), x(math.log2(high))
        if right > left:
            yield Band(kind=kind, x=left, y=y, width=round(right - left, 1), height=_STRIP_HEIGHT, label="")


def _held_plot(report: ProbeReport) -> Plot | None:
    """For each format, how many tensors it holds as they are, how many with a scale of their own, and how many not."""
    bars = []
    for i, name in enumerate(report.formats):
        held = sum(t.scaled[i].fits for t in report.tensors)
        own = sum(t.scaled[i].fits_own_scale and not t.scaled[i].fits for t in report.tensors)
        lost = len(report.tensors) - held - own
        text = f"{held} of {len(report.tensors)}" + (f", {own} more with a scale" if own else "")
        bars.append(Bar(name=name, text=text, lengths=(float(held), float(own), float(lost))))
    parts = {"held": "held", "held with a scale of its own": "own-scale", "not held": "not-held"}
    words = "Layers and classes of tensor together."
    return bar_plot("held", "Which tensors each format holds", words, bars, x_label="tensors", parts=parts)


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
    title = f"{t.words} of {t.layer} in {rates.format}"
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
