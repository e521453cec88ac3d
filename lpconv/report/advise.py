"""The document of an advice: what to do for each purpose and at what cost, every candidate, and open questions."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath

from lpconv.layouts import SCHEMES
from lpconv.report.charts import Axis, Bar, Chart, Mark, Tick, bar_chart, round_step, stepped_axis
from lpconv.report.document import Code, Document, Section, Table, Tile, Verdict, section, sections_of
from lpconv.report.numbers import MISSING, change_text, duration_text, format_text, plural, size_text, sqnr_text
from lpconv.results import AdviceResult, AdviceRow, GapEstimate, LossScaleRecord, RecipeNoise, Recommendation

NOT_SMALLER = "not smaller than the model itself"
_NONE_FITS = "no candidate, since none can be tried"
_PARTS = 12  # most parts in the table
_HEADINGS = {"infer": "Inference", "train": "Training"}
_COLUMNS = {
    "infer": ("Conversion", "Size", "Memory", "Step", "Gap", "<95 % interval", "<Why"),
    "train": ("Recipe", "Memory", "Step", "Gap", "<95 % interval", "<Why"),
}
_PART_COLUMNS = ("Weights", "Format", "Bits", "SQNR, dB", "Part")
_BARS = 8  # most parts in the chart
_USUAL_NOISE = 1e-3  # of the weights, relative to the signal, which models usually bear: 30 dB, as in 8-bit floats
_MOST_WINDOWS = 64  # of a text, on which a conversion is measured
_ITSELF = Mark(kind="series-2", shape="square", title="the model itself")


def advice_document(result: AdviceResult) -> Document:
    """The recommendations first, then every candidate for each purpose, and what the advice does not know."""
    parts = Table(columns=_PART_COLUMNS, rows=_part_rows(result), has_names=True)
    return Document(
        kind="advice",
        title=PurePath(result.name).name or result.name,
        subtitle=f"{result.name}: what low precision saves, and what it costs",
        verdict=_verdict(result),
        tiles=_tiles(result),
        warnings=result.warnings,
        sections=sections_of(
            *(
                section(_HEADINGS[r.purpose], r.words, Code(lines=(r.command,)) if r.command else None)
                for r in result.recommendations
            ),
            section("", *(front_chart(result, p, heading) for p, heading in _HEADINGS.items()), _parts_chart(result)),
            *(_candidate_section(result, p) for p in _HEADINGS),
            section(f"Where {result.parts_of} costs most", parts, _sum_words(result)),
            section("One step in low precision", result.findings),
            section("What this does not cover", result.unknowns),
        ),
        facts={**result.facts, "Took": duration_text(result.seconds)},
        command=result.command,
        versions=result.versions,
    )


def _verdict(result: AdviceResult) -> Verdict | None:
    """The recommendation for each purpose; outcome "not run" if a purpose has none."""
    if not result.recommendations:
        return None
    parts = (f"{_short_answer(result, r)} for {_HEADINGS[r.purpose].lower()}" for r in result.recommendations)
    is_whole = all(r.row or (not r.nearest and _was_tried(result, r.purpose)) for r in result.recommendations)
    return Verdict(outcome="passed" if is_whole else "not run", text=f"Recommended: {'; '.join(parts)}")


def _short_answer(result: AdviceResult, advised: Recommendation) -> str:
    if advised.row or advised.nearest:
        return advised.row or f"undecided (nearest: {advised.nearest})"
    return "the model as it is" if _was_tried(result, advised.purpose) else _NONE_FITS


def _was_tried(result: AdviceResult, purpose: str) -> bool:
    return any(r.gap is not None or r.why == NOT_SMALLER for r in _of_purpose(result, purpose))


def _candidate_section(result: AdviceResult, purpose: str) -> Section | None:
    """The candidates for a purpose, best first; those that were not measured are folded away, because they are many."""
    rows = _of_purpose(result, purpose)
    shown, folded = (
        tuple(_cells(result, r) for r in rows if (r.status in ("pruned", "unmeasured")) is hidden)
        for hidden in (False, True)
    )
    title = f"{len(folded)} more that were not measured, with reasons"
    tables = Table(columns=_COLUMNS[purpose], rows=shown), Table(columns=_COLUMNS[purpose], rows=folded, folded=title)
    return section(f"{_HEADINGS[purpose]}: every candidate, best first", *tables)


def _tiles(result: AdviceResult) -> tuple[Tile, ...]:
    gaps = {(r.purpose, r.name): _gap_text(r.gap, _unit_of(result, r)) for r in result.rows if r.gap is not None}
    tiles: list[Tile] = []
    for advised in result.recommendations:
        figure = advised.nearest or ("as it is" if _was_tried(result, advised.purpose) else MISSING)
        detail = "undecided" if advised.nearest else "no candidate is good enough"
        detail = _NONE_FITS if figure == MISSING else detail
        if gap := gaps.get((advised.purpose, advised.row or "")):
            figure, detail = str(advised.row), f"gap {gap}"
        tiles.append(Tile(label=_HEADINGS[advised.purpose], figure=figure, detail=detail))
    counted = sum(r.status == "measured" for r in result.rows)
    detail = f"of {len(result.rows)}, {duration_text(result.seconds)}"
    return (*tiles, Tile(label="Tried", figure=plural(counted, "candidate"), detail=detail))


def _of_purpose(result: AdviceResult, purpose: str) -> tuple[AdviceRow, ...]:
    return tuple(r for r in result.rows if r.purpose == purpose)


def _cells(result: AdviceResult, row: AdviceRow) -> tuple[str, ...]:
    gap, interval = _gap_cells(row.gap, _unit_of(result, row))
    size = (size_text(row.size_bytes),) if row.purpose == "infer" else ()
    return (row.name, *size, size_text(row.memory_bytes), duration_text(row.step_time_s), gap, interval, _why(row))


def _why(row: AdviceRow) -> str:
    if row.status != "measured" or row.gap is None:
        return row.why if row.status in ("pruned", "unmeasured") else f"failed: {row.why}"
    counted = plural(row.gap.count, "window" if row.purpose == "infer" else "seed")
    is_known = math.isfinite(row.gap.high)
    if row.calibration_s is not None:
        counted += f", calibrated in {duration_text(row.calibration_s)}"
    return counted if row.meets or not is_known else f"{counted}; not certain to stay within the budget"


def _unit_of(result: AdviceResult, row: AdviceRow) -> str:
    """Whether the gap of a row is of the loss or of the outputs."""
    return "loss" if row.purpose == "train" else result.metric


def _gap_cells(gap: GapEstimate | None, unit: str) -> tuple[str, str]:
    if gap is None:
        return MISSING, MISSING
    value = _value_text(gap.value, unit)
    if not (math.isfinite(gap.low) and math.isfinite(gap.high)):
        return value, "unknown with one seed"
    return value, f"{_value_text(gap.low, unit)} to {_value_text(gap.high, unit)}"


def _value_text(value: float, unit: str) -> str:
    return f"{100 * value:.2g} %" if unit == "output" else f"{value:+z.4f}"


def _gap_text(gap: GapEstimate, unit: str) -> str:
    value, interval = _gap_cells(gap, unit)
    return f"{value}{'' if unit == 'output' else ' nats'} ({interval})"


def recommendation(result: AdviceResult, row: AdviceRow | None, purpose: str) -> str:
    """The recommendation for a purpose and its cost, in two or three sentences."""
    if row is None or row.gap is None:
        return _no_recommendation(result, purpose)
    return _convert_words(result, row) if purpose == "infer" else _train_words(result, row)


def _convert_words(result: AdviceResult, row: AdviceRow) -> str:
    assert row.gap is not None
    change = change_text(result.source_bytes, row.size_bytes or 0)
    opened = f" Opened by: {SCHEMES[row.settings['scheme']].opens}." if "scheme" in row.settings else ""
    rounded = f", with inputs rounded to {row.rounded_inputs}," if row.rounded_inputs else ""
    what = "the loss on the text changes by" if result.metric == "loss" else "the relative error of the outputs is"
    within = "within" if row.meets else "not certain to be within"  # with --bits
    return (
        f"Convert with {row.name}: {size_text(row.size_bytes)} instead of {size_text(result.source_bytes)} ({change}). "
        f"On {plural(row.gap.count, 'window')}{rounded} {what} {_gap_text(row.gap, result.metric)}, {within} "
        f"the {_budget_text(result, result.metric)} allowed.{opened}"
    )


def _train_words(result: AdviceResult, row: AdviceRow) -> str:
    assert row.gap is not None
    tried = f"{plural(row.gap.count, 'run')} of {plural(result.steps_tried, 'step')}"
    whole = plural(int(result.options["steps"]), "step")
    return (
        f"Train with the recipe {row.name}. From {tried}, a run of {whole} is estimated "
        f"to end {_gap_text(row.gap, 'loss')} from its fp32 twin, within the {_budget_text(result, 'loss')} allowed. "
        f"A step takes {size_text(row.memory_bytes)} of memory ({row.memory_from}).{_fastest(result, row)}"
    )


def _fastest(result: AdviceResult, row: AdviceRow) -> str:
    """A sentence about the recipe with the shortest steps; "" if that is the recommended one."""
    timed = [r for r in _of_purpose(result, row.purpose) if r.meets and r.step_time_s]
    fastest = min(timed, key=lambda r: r.step_time_s or math.inf, default=row)
    if not row.step_time_s or not fastest.step_time_s or fastest.step_time_s > 0.9 * row.step_time_s:
        return ""
    times = f"{duration_text(fastest.step_time_s)} instead of {duration_text(row.step_time_s)}"
    return f" Within the same budget {fastest.name} has the shortest steps: {times} ({fastest.time_from})."


def _budget_text(result: AdviceResult, unit: str) -> str:
    quality = float(result.options["budget"]["quality"])
    return f"{100 * quality:.2g} %" if unit == "output" else f"{quality:.3g} nats"


def nearest(result: AdviceResult, purpose: str) -> AdviceRow | None:
    """The most promising candidate that is not certain to exceed the budget; None if all are."""
    quality = float(result.options["budget"]["quality"])
    rows = [r for r in _of_purpose(result, purpose) if r.status in ("measured", "unmeasured")]
    possible = [r for r in rows if r.gap is None or r.gap.low <= quality]
    return min(possible, key=lambda r: (r.gap is None, r.noise is None, _distance(r.noise)), default=None)


def _distance(noise: float | None) -> float:
    return abs(math.log(max(noise or 1.0, 1e-9) / _USUAL_NOISE))


def _no_recommendation(result: AdviceResult, purpose: str) -> str:
    """What is undecided, the nearest candidate, and what would decide it."""
    rows, near = _of_purpose(result, purpose), nearest(result, purpose)
    unit = "loss" if purpose == "train" else result.metric
    limit, measured = _budget_text(result, unit), [r for r in rows if r.gap is not None]
    if near is None and measured:
        return (
            f"Keep the model as it is: {_gap_words(measured[0], unit)} loses least of the measured candidates, and "
            f"more than the {limit} allowed. A larger quality= in --budget allows more."
        )
    if near is None and _was_tried(result, purpose):
        return "Keep the model as it is: no candidate is smaller."
    if near is None:
        why = next((f", for example {r.name}: {r.why}" for r in rows if r.status in ("failed", "pruned")), "")
        return (
            f"No candidate can be tried on this model{why}." if rows else _undecided(result, "nothing was tried", 0.0)
        )
    if near.gap is None:
        what = f"{near.name} is the most likely candidate, but there was no time to measure it"
        return _undecided(result, what, near.seconds or 0.0)
    what = f"{_gap_words(near, unit)} is nearest, but not certain to stay within {limit} and the allowed memory"
    return _undecided(result, what, _seconds_to_decide(result, near))


def _gap_words(row: AdviceRow, unit: str) -> str:
    assert row.gap is not None
    return f"{row.name} with a gap of {_gap_text(row.gap, unit)}"


def _undecided(result: AdviceResult, what: str, seconds: float | None) -> str:
    """What is open, and the option that would decide it in `seconds` more; None means that no time would."""
    asked = float(result.options["budget"]["minutes"])
    if seconds is None:
        return f"Undecided: {what}. More time would not decide it; a quality= above its interval would accept it."
    minutes = math.ceil(max(asked, result.seconds / 60) + max(seconds / 60, asked / 2))
    return f"Undecided: {what}. About {minutes} minutes should decide it: pass minutes={minutes} in --budget."


def _seconds_to_decide(result: AdviceResult, row: AdviceRow) -> float | None:
    """Time in which the interval of a row would leave the limit if its mean stays; None if it would not."""
    assert row.gap is not None
    quality = float(result.options["budget"]["quality"])
    if not math.isfinite(row.gap.high):
        return 2 * (row.seconds or 0.0)  # two more seeds
    growth = ((row.gap.high - row.gap.value) / max(abs(quality - row.gap.value), 1e-12)) ** 2
    if growth * row.gap.count > _MOST_WINDOWS or row.gap.high <= quality:
        return None
    return growth * (row.seconds or 0.0)


def unknowns(result: AdviceResult) -> Iterator[str]:
    """Sentences about what the advice does not know."""
    measured = [r for r in result.rows if r.status == "measured"]
    sources = {r.time_from for r in measured if r.time_from.startswith("roofline")}
    for source in sorted(sources):
        yield f"Step times are estimates: {source}. Real steps take longer."
    if any(r.purpose == "infer" for r in measured):
        yield (
            "Products were computed in fp32 with the stored weights, and rounded inputs if the scheme rounds them. "
            "A model in 16 bits also rounds its activations, which the gap does not include."
        )
    if result.options.get("data") and any(r.calibration_s for r in measured):
        yield (
            "Candidates with gptaq were calibrated on the text on which they were tested, so they may keep less of the "
            "quality on other text."
        )
    tried, whole = result.steps_tried, int(result.options["steps"])
    if any(r.purpose == "train" for r in measured) and tried < whole:
        yield (
            f"{tried} steps represent {whole}. The interval accounts for the observed drift and for updates that "
            "rounding dropped, but not for effects that only appear in long runs."
        )
    if any(r.purpose == "train" and r.time_from == "measured here" for r in measured):
        yield "On a CPU, fp8 and fp16 are emulated, so their step times here do not predict those on a GPU."
    left = [r.name for r in result.rows if r.status == "unmeasured"]
    if left:
        yield f"Not measured for lack of time: {', '.join(left)}."
    if result.interrupted:
        yield "The measurements were stopped early."


def findings_of(findings: Mapping[str, tuple[str, ...]], loss_scales: Iterable[LossScaleRecord]) -> tuple[str, ...]:
    """Findings of one forward and backward step: the worst tensor in each format, and loss scales."""
    worst = [f"{name}: {sentences[0]}" for name, sentences in findings.items() if sentences]
    scales = [f"{s.format} gradients need a loss scale of 2^{s.log2_scale}" for s in loss_scales if s.log2_scale > 0]
    return (*worst, *scales)


def noise_findings(noise: Iterable[RecipeNoise]) -> tuple[str, ...]:
    """Gradients of each recipe over their rounding noise: "nvfp4: gradients are 4.1 times their rounding noise"."""
    return tuple(f"{n.name}: gradients are {n.ratio:.2g} times their rounding noise" for n in noise if n.noise)


def _part_rows(result: AdviceResult) -> tuple[tuple[str, ...], ...]:
    unit = " nats" if result.metric == "loss" else ""
    return tuple(
        (
            p.tensor.removeprefix("re:^"),
            format_text(p.format),
            f"{p.bits:.3g}",
            sqnr_text(p.sqnr_db),
            f"{p.divergence:.1e}{unit}",
        )
        for p in result.parts[:_PARTS]
    )


def _sum_words(result: AdviceResult) -> str | None:
    """How well the parts predict the cost of the whole; None if not all were measured."""
    if result.parts_whole is None:
        return None
    power, unit = (1, " nats") if result.metric == "loss" else (2, "")
    total = sum(p.divergence**power for p in result.parts) ** (1 / power)
    what = "parts add up" if power == 1 else "squares of the parts add up"
    return f"The {what} to {total:.2g}{unit}; together they cost {result.parts_whole:.2g}{unit}."


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
    for r in sorted(rows, key=lambda r: r.name in advised):  # the recommended one in front
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


def _parts_chart(result: AdviceResult) -> Chart | None:
    """The parts that cost most, as bars."""
    bars = [
        Bar(name=p.tensor.removeprefix("re:^"), text=f"{p.divergence:.1e}", lengths=(p.divergence,))
        for p in result.parts[:_BARS]
    ]
    words = "nats of divergence" if result.metric == "loss" else "relative error of the output"
    about = f"Cost of storing only this part as {result.parts_of}; the most expensive ones."
    return bar_chart("Cost of each part", about, bars, x_label=words, tick=lambda value: f"{value:.2g}")
