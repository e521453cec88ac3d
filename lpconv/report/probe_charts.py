"""Charts of a probe: distribution of values, tensors that fit each format, and losses by layer."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from lpconv.formats.spec import FORMATS, Format
from lpconv.report.charts import Axis, Bar, Box, Chart, HeatMap, Loss, Mark, Tick, bar_chart, stepped_axis
from lpconv.report.numbers import power_text, share_text
from lpconv.results import FormatRates, ProbedRecord, ProbeReport

_ROOM = 2  # free binades on either side of the values
_MIN_BINADES = 24
_MAX_BELOW_AXIS = 1e-3  # share of a class's elements
_STRIP = 0.102  # height of a format's window, relative to the highest bar


def held_chart(report: ProbeReport, title: str) -> Chart | None:
    """Number of tensors that fit each format as they are, only with a scale of their own, and not at all."""
    bars = []
    for i, name in enumerate(report.formats):
        held = sum(t.scaled[i].fits for t in report.tensors)
        own = sum(t.scaled[i].fits_own_scale and not t.scaled[i].fits for t in report.tensors)
        lost = len(report.tensors) - held - own
        text = f"{held} of {len(report.tensors)}" + (f", {own} more with a scale" if own else "")
        bars.append(Bar(name=name, text=text, lengths=(float(held), float(own), float(lost))))
    parts = {"held": "held", "held with a scale per tensor": "own-scale", "not held": "not-held"}
    return bar_chart(title, "All layers and classes of tensor.", bars, x_label="tensors", parts=parts)


def exponent_charts(report: ProbeReport) -> tuple[Chart, ...]:
    """A histogram for each class on a common exponent axis, above the ranges of the report's formats."""
    totals = _totals(report.tensors)
    if not totals:
        return ()
    scale = next((s for s in report.loss_scales if s.log2_scale), None)
    shift = scale.log2_scale if scale else 0
    gradients = {t.words for t in report.tensors if t.is_gradient}
    lows = [_lowest_exponent(c) + (min(shift, 0) if w in gradients else 0) for w, c in totals.items()]
    highs = [max(c) + (max(shift, 0) if w in gradients else 0) for w, c in totals.items()]
    low, high = min(lows) - _ROOM, max(highs) + 1 + _ROOM
    high = max(high, low + _MIN_BINADES)
    label = f"at loss scale {power_text(shift)}, recommended for {scale.format}" if scale else ""
    windows = [FORMATS[name] for name in report.formats if name in FORMATS]
    return tuple(
        _exponent_chart(words, totals[words], (low, high), windows, (shift, label) if words in gradients else (0, ""))
        for words in report.classes
        if words in totals
    )


def _lowest_exponent(counts: Counter[int]) -> int:
    """The first exponent of the axis: almost no element is below, and outliers do not squeeze the rest."""
    allowed, seen = _MAX_BELOW_AXIS * counts.total(), 0
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


def _exponent_chart(
    words: str,
    counts: Counter[int],
    span: tuple[int, int],
    windows: Sequence[Format],
    scaled: tuple[int, str],
) -> Chart:
    """The share of elements at each exponent; `scaled` is the shift by the loss scale in binades, and its label."""
    low, high = span
    shares = [(e, counts[e] / counts.total()) for e in range(max(low, min(counts)), max(counts) + 1)]
    top, (shift, label) = 1.05 * max(share for _, share in shares), scaled
    outline = [(e + shift + side, share) for e, share in shares for side in (0, 1)]
    moved = Mark(
        kind="outline",
        shape="line",
        title=label,
        points=((outline[0][0], 0), *outline, (outline[-1][0], 0)),
    )
    legend = (
        Mark(kind="bar", shape="square", title="elements"),
        Mark(kind="normal", shape="square", title="normal numbers of the format"),
        Mark(kind="subnormal", shape="square", title="subnormal ones"),
    )
    return Chart(
        title=words[:1].upper() + words[1:],
        description=_bulk_words(counts, low),
        x=stepped_axis(
            low, high, next(s for s in (4, 8, 16, 32, 64) if (high - low) / s <= 8), lambda e: f"2^{e}", "magnitude"
        ),
        y=_share_axis(top, windows),
        boxes=(
            *(Box(kind="bar", x=(e, e + 1), y=(0, share)) for e, share in shares if share),
            *(box for i, held in enumerate(windows) for box in _range_boxes(held, i, top, span)),
        ),
        marks=(moved,) if shift else (),
        legend=(*legend, moved) if shift else legend,
    )


def _share_axis(top: float, formats: Sequence[Format]) -> Axis:
    """Axis of shares up to `top`, with a strip for each format below zero."""
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if top / s <= 5)
    shares = stepped_axis(0, top, step, lambda share: f"{100 * share:.0f} %")
    names = (Tick(at=-(i + 0.9) * _STRIP * top, label=f.name, has_line=False) for i, f in enumerate(formats))
    return Axis(low=-(len(formats) + 0.45) * _STRIP * top, high=top, ticks=(*shares.ticks, *names))


def _range_boxes(held: Format, row: int, top: float, span: tuple[int, int]) -> Iterator[Box]:
    """The range of a format in its strip: its subnormal and its normal numbers."""
    y = (-(row + 1.3) * _STRIP * top, -(row + 0.5) * _STRIP * top)
    for kind, low, high in (("subnormal", held.min_subnormal, held.min_normal), ("normal", held.min_normal, held.max)):
        left, right = (min(max(math.log2(v), span[0]), span[1]) for v in (low, high))
        if right > left:
            yield Box(kind=kind, x=(left, right), y=y)


def _bulk_words(counts: Counter[int], axis_low: int) -> str:
    """Text on the exponents that cover 98 % of the elements, and on elements below the axis."""
    total, seen, low, high = counts.total(), 0, min(counts), max(counts)
    for e in sorted(counts):
        if seen <= 0.01 * total:
            low = e
        seen += counts[e]
        if seen >= 0.99 * total:
            high = e
            break
    below = sum(n for e, n in counts.items() if e < axis_low)
    rest = f" {share_text(below, total)} are below the axis." if below else ""
    return f"98 % of the elements are between 2^{low} and 2^{high + 1}.{rest}"


def heat_map(report: ProbeReport) -> HeatMap | None:
    """Elements lost at loss scale 1 by layer and class, for every format that loses any."""
    shown = [i for i in range(len(report.formats)) if any(t.plain[i].lost > 0 for t in report.tensors)]
    if not shown:
        return None
    worst = [(i, max(report.tensors, key=lambda t: t.plain[i].lost)) for i in shown]
    parts = (
        f"{report.formats[i]}: at worst {share_text(t.plain[i].lost, 1)}, {t.words} of {t.layer}." for i, t in worst
    )
    return HeatMap(
        title="Elements lost by layer and class of tensor",
        description=" ".join(parts),
        blocks=tuple(report.formats[i] for i in shown),
        columns=report.classes,
        losses=tuple(_loss(t, t.plain[i], report.formats[i]) for i in shown for t in report.tensors),
    )


def _loss(t: ProbedRecord, rates: FormatRates, block: str) -> Loss:
    title = f"{t.words} of {t.layer} in {rates.format}"
    return Loss(
        layer=t.layer, block=block, column=t.words, underflow=rates.underflow, overflow=rates.overflow, title=title
    )
