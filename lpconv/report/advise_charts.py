"""Charts of an advice: quality against the cost of each candidate, and the share of each tensor."""

import math
from dataclasses import replace

from lpconv.report.charts import Axis, Bar, Chart, Mark, Tick, bar_chart, round_step, stepped_axis
from lpconv.report.numbers import size_text
from lpconv.results import AdviceResult, AdviceRow

_PARTS = 8  # most tensors in the chart
_ITSELF = Mark(kind="series-2", shape="square", title="the model itself")


def front_chart(result: AdviceResult, purpose: str, heading: str) -> Chart | None:
    """Gap against size (for training, memory) with intervals; None with fewer than two points.

    Gaps may have either sign, so the axis is asinh: linear up to a tenth of the budget's power of ten, logarithmic
    beyond.
    """
    rows = [r for r in result.rows if r.purpose == purpose and _is_drawn(r)]
    start = float(result.source_bytes) if purpose == "infer" else 0.0
    if len(rows) + bool(start) < 2 or not rows:
        return None
    quality = float(result.options["budget"]["quality"])
    unit = 10.0 ** (math.floor(math.log10(quality)) - 1)
    ends = [0.0, quality, *(e for r in rows if r.gap for e in (r.gap.low, r.gap.high))]
    right = 1.05 * max(start, *(_cost(r) for r in rows))
    advised = {a.row for a in result.recommendations if a.purpose == purpose}
    budget = math.asinh(quality / unit)
    marks = [Mark(kind="move", shape="line", title="budget", points=((0, budget), (right, budget)))]
    if start:
        marks.append(replace(_ITSELF, points=((start, 0.0),)))
    measured = Mark(kind="series-0", shape="circle", title="gap, measured")
    best = Mark(kind="series-1", shape="diamond", title="recommended")
    for r in rows:
        marks += _front_marks(r, best if r.name in advised else measured, unit)
    labels = ((_cost(r), _height(r, unit), r.name) for r in rows if r.name in advised)
    title = f"{heading}: quality against {'size' if purpose == 'infer' else 'memory'}"
    what = "size on disk" if purpose == "infer" else "memory of a step"
    return Chart(
        title=title,
        description="Lower and further left is better. Bars are 95 % intervals, the line is the budget. The scale of "
        f"gaps is linear around zero and logarithmic beyond {unit:g}.",
        x=stepped_axis(0.0, right, round_step(right / 4), size_text, what),
        y=_gap_axis(unit, min(ends), max(ends)),
        marks=tuple(marks),
        labels=tuple(labels),
        legend=(best, measured, *([_ITSELF] if start else [])),
    )


def _gap_axis(unit: float, low: float, high: float) -> Axis:
    """Axis with ticks at zero and at powers of ten from `unit` up, on both sides as far as the gaps go."""
    powers = [unit * 10.0**n for n in range(20)]
    gaps = [*(-p for p in powers if -p >= low), 0.0, *(p for p in powers if p <= high)]
    return Axis(
        low=math.asinh(low / unit) - 0.3,
        high=math.asinh(high / unit) + 0.3,
        ticks=tuple(Tick(at=math.asinh(gap / unit), label=f"{gap:g}") for gap in gaps),
    )


def _front_marks(row: AdviceRow, mark: Mark, unit: float) -> tuple[Mark, Mark]:
    assert row.gap is not None
    x, ends = _cost(row), (row.gap.high, row.gap.low)
    interval = tuple((x, math.asinh(gap / unit)) for gap in ends)
    return (
        Mark(kind=f"line {mark.kind}", shape="line", title=row.name, points=interval),
        replace(mark, title=row.name, points=((x, _height(row, unit)),)),
    )


def _height(row: AdviceRow, unit: float) -> float:
    assert row.gap is not None
    return math.asinh(row.gap.value / unit)


def _cost(row: AdviceRow) -> float:
    """Cost of a candidate: bytes on disk, or for training bytes of memory."""
    return float((row.size_bytes if row.purpose == "infer" else row.memory_bytes) or 0)


def _is_drawn(row: AdviceRow) -> bool:
    return row.status == "measured" and row.gap is not None and math.isfinite(row.gap.high) and _cost(row) > 0


def parts_chart(result: AdviceResult) -> Chart | None:
    """The tensors that cost most, as bars."""
    bars = [Bar(name=p.tensor, text=f"{p.divergence:.1e}", lengths=(p.divergence,)) for p in result.parts[:_PARTS]]
    words = "nats of divergence" if result.metric == "loss" else "relative error of the output"
    about = f"Cost of storing only that tensor as {result.parts_of}; the most expensive ones."
    return bar_chart("Cost of each tensor", about, bars, x_label=words, tick=lambda value: f"{value:.2g}")
