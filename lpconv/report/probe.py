"""Documents of a probe: distribution of a model's values, losses in each format, and tensors that each fits."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

from lpconv.formats.spec import FORMATS, Format
from lpconv.report.charts import HEAT_WORDS, Axis, Bar, Box, Chart, HeatMap, Loss, Mark, Tick, bar_chart, stepped_axis
from lpconv.report.document import Cell, Document, Row, Section, Table, Tile, Verdict, section, sections_of
from lpconv.report.numbers import MISSING, count_text, number_text, plural, power_text, share_text, sqnr_text
from lpconv.results import ProbedRecord, ProbeReport

_MAX_UNDERFLOW = 1e-3  # target of the loss scale recommendation

_FIT_WORDS = (
    "A format holds a tensor if no element overflows, at most 0.1 % become zero and its SQNR is at least 20 dB; "
    "gradients at the recommended loss scale. In brackets: with a power-of-two scale per tensor, if that differs."
)
_NOISE_WORDS = (
    "Norm of the gradients over the norm of what rounded products add to them: noise from stochastic rounding, and a "
    "bias from rounding to nearest, mostly in the forward pass. Below √3 = 1.7 of the noise, training stops helping "
    "(arXiv 2505.19115). Measure with the batch of your training: both change with its size."
)
_EXPONENT_WORDS = "Elements by exponent over all layers, above the range of each format."
_TENSOR_WORDS = (
    "SQNR in dB at loss scale 1. “Held by” uses the recommended loss scale for gradients; formats in brackets hold "
    "the tensor with a scale for it."
)
_DETAIL_WORDS = (
    "SQNR in dB at loss scale 1. “Held” uses the recommended loss scale for gradients; “scaled” needs a scale for the "
    "tensor."
)
_ROOM = 2  # free binades on either side of the values
_MIN_BINADES = 24
_MAX_BELOW_AXIS = 1e-3  # share of a class's elements
_STRIP = 0.102  # height of a format's window, relative to the highest bar


def probe_document(report: ProbeReport) -> Document:
    """Losses in each format, worst first.

    A report on a single format lists every tensor on the terminal too.
    """
    return Document(
        kind="probe",
        title=PurePath(report.name).name or report.name,
        subtitle=_subtitle(report),
        verdict=_verdict(report),
        tiles=_tiles(report),
        warnings=report.warnings,
        sections=sections_of(
            *(section(f"Worst in {n}", report.findings.get(n, ()) or "Nothing is lost.") for n in report.formats),
            section("Operands at risk in fp8", report.at_risk),
            _noise_section(report),
            _loss_scale_section(report),
            _fit_section(report),
            section("Ranges of values", *exponent_charts(report), _EXPONENT_WORDS, only="page"),
            section(
                "Elements lost, by layer and class", heat_map(report), f"At loss scale 1. {HEAT_WORDS}", only="page"
            ),
            _tensor_section(report),
        ),
        facts=_facts(report),
    )


def _subtitle(report: ProbeReport) -> str:
    steps = plural(report.steps_recorded, "forward and backward step")
    text = report.facts.get("Text")
    return f"{report.name}: {steps} in high precision" + (f" on {text}" if text else "")


def _verdict(report: ProbeReport) -> Verdict:
    """How many tensors each format keeps, and where those that lose some lose most."""
    lost = [[t for t in report.tensors if not t.scaled[i].fits_own_scale] for i in range(len(report.formats))]
    counts, total, text = [], len(report.tensors), report.facts.get("Text", "")
    for i, name in enumerate(report.formats):
        worst = max(lost[i], key=lambda t: (t.scaled[i].lost, -t.scaled[i].sqnr_db), default=None)
        where = "" if worst is None else f" (worst: {worst.words} of {worst.layer})"
        counts.append(f"{name} keeps {count_text(total - len(lost[i]))}{where}")
    measured = f"Measured on {text}. " if text.startswith("random token ids") else ""
    return Verdict(
        outcome="not run" if any(lost) else "passed",
        text=f"{measured}Of {plural(total, 'tensor')}, each with its own scale, {', '.join(counts)}",
    )


def _tiles(report: ProbeReport) -> tuple[Tile, ...]:
    tiles = [
        Tile(
            label=f"Loss scale for {s.format}",
            figure=power_text(s.log2_scale),
            detail=f"worst gradient underflow {share_text(s.worst_underflow_before, 1)} at 1, "
            f"{share_text(s.worst_underflow_after, 1)} with it",
        )
        for s in report.loss_scales[:1]
    ]
    steps = f"of step time; {report.steps_recorded} of {report.steps_seen} steps were recorded"
    return (*tiles, Tile(label="Recording added", figure=share_text(report.overhead, 1), detail=steps))


def _facts(report: ProbeReport) -> dict[str, str]:
    facts = dict(report.facts)
    losses = ", ".join(number_text(loss) for loss in report.losses[:4])
    if losses:
        more = f" and {plural(len(report.losses) - 4, 'more step')}" if len(report.losses) > 4 else ""
        facts["Loss"] = f"{losses}{more}" + (f": {facts['Loss']}" if "Loss" in facts else "")
    return facts


def _noise_section(report: ProbeReport) -> Section | None:
    """Gradients over the noise and the bias of rounding in each recipe, for the whole model and for its worst layer."""
    rows = []
    for recipe in report.noise:
        worst = min(recipe.layers, key=lambda x: x.ratio, default=recipe)
        drowned = sum(x.is_drowned for x in recipe.layers)
        figures = [_times_text(recipe.gradient, x) for x in (recipe.noise, recipe.bias)]
        lowest = (_times_text(worst.gradient, worst.noise), worst.name) if recipe.noise else (MISSING, MISSING)
        rows.append((recipe.name, *figures, f"{drowned} of {len(recipe.layers)}", *lowest))
    columns = ("Recipe", "Gradient / noise", "Gradient / bias", "Layers below √3", "Lowest", "<Layer")
    table = Table(columns=columns, rows=tuple(rows))
    return section("Gradients and the rounding of four bits", table, _NOISE_WORDS) if rows else None


def _times_text(gradient: float, error: float) -> str:
    return number_text(float(f"{gradient / error:.2g}")) if error else MISSING


def _loss_scale_section(report: ProbeReport) -> Section | None:
    """The recommended loss scales, and the formats for which no scale is enough for every gradient."""
    title = "Recommended loss scale, for the worst gradient of the model"
    if not report.loss_scales:
        return section(title, "No gradient was recorded.")
    rows = tuple(
        (
            s.format,
            power_text(s.log2_scale),
            power_text(s.max_log2_scale),
            share_text(s.worst_underflow_before, 1),
            share_text(s.worst_underflow_after, 1),
        )
        for s in report.loss_scales
    )
    columns = ("Format", "Loss scale", "At most", "Worst underflow at 1", "With the scale")
    capped = [s.format for s in report.loss_scales if s.worst_underflow_after > _MAX_UNDERFLOW]
    words = f"In {', '.join(capped)}, no loss scale gets every gradient below 0.1 %: larger scales would overflow."
    alone = "The loss scales above suit a single tensor; these suit the whole model."
    return section(title, Table(columns=columns, rows=rows), alone, words if capped else None)


def _fit_section(report: ProbeReport) -> Section | None:
    """Tensors of each class that fit each format: "3 of 26", or "0 (26) of 26" if 26 fit with their own scales."""
    title, rows = "Tensors that each format holds", []
    for words in report.classes:
        members = [t for t in report.tensors if t.words == words]
        rows.append((words, *(_fit_count(members, i) for i in range(len(report.formats)))))
    table = Table(columns=("Class", *report.formats), rows=tuple(rows))
    return section(title, _held_chart(report, title), table, _FIT_WORDS)


def _fit_count(members: Sequence[ProbedRecord], index: int) -> str:
    held = sum(t.scaled[index].fits for t in members)
    own = sum(t.scaled[index].fits_own_scale for t in members)
    return f"{held} of {len(members)}" if own == held else f"{held} ({own}) of {len(members)}"


def _tensor_section(report: ProbeReport) -> Section | None:
    """Every tensor in layer order. For a single format: in detail, worst first, and on terminals too."""
    if len(report.formats) == 1:
        ordered = sorted(report.tensors, key=lambda t: t.plain[0].worst_first)
        details = [(t.layer, t.words, *_detail_cells(t)) for t in ordered]
        table = _tensor_table(("To zero", "Subnormal", "Beyond range", "SQNR", "<Held"), details)
        return section(f"Every tensor in {report.formats[0]}, the worst first", table, _DETAIL_WORDS)
    lost = (f"{name}: {what}" for name in report.formats for what in ("lost", "SQNR"))
    rows: list[Row] = [
        (t.layer, t.words, Cell(text=count_text(t.num_elements), sort=t.num_elements), *_lost_cells(t), _held_by(t))
        for t in report.tensors
    ]
    return section("Every tensor", _tensor_table(("Elements", *lost, "<Held by"), rows), _TENSOR_WORDS, only="page")


def _tensor_table(columns: Iterable[str], rows: Sequence[Row]) -> Table:
    example = "attention output gradient"
    return Table(
        columns=("Layer", "<Tensor", *columns), rows=tuple(rows), has_names=True, sortable=True, filter=example
    )


def _lost_cells(t: ProbedRecord) -> list[Cell]:
    cells = []
    for r in t.plain:
        mark = " ↑" if r.overflow > r.underflow else ""
        cells += [
            Cell(text=f"{share_text(r.lost, 1)}{mark}", sort=r.lost),
            Cell(text=sqnr_text(r.sqnr_db), sort=r.sqnr_db),
        ]
    return cells


def _detail_cells(t: ProbedRecord) -> Row:
    rates, held = t.plain[0], t.scaled[0]
    shares = (Cell(text=share_text(x, 1), sort=x) for x in (rates.underflow, rates.subnormal, rates.overflow))
    words = "yes" if held.fits else "scaled" if held.fits_own_scale else "no"
    return *shares, Cell(text=sqnr_text(rates.sqnr_db), sort=rates.sqnr_db), words


def _held_by(tensor: ProbedRecord) -> str:
    """The formats that fit a tensor; in brackets if only with a scale of its own."""
    names = [r.format if r.fits else f"({r.format})" for r in tensor.scaled if r.fits or r.fits_own_scale]
    return ", ".join(names) or MISSING


def _held_chart(report: ProbeReport, title: str) -> Chart | None:
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
    lows = [_edge(c, _MAX_BELOW_AXIS) + (min(shift, 0) if w in gradients else 0) for w, c in totals.items()]
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


def _edge(counts: Counter[int], share: float, *, upper: bool = False) -> int:
    """The lowest exponent, or the `upper` one, without outliers: at most this share of the elements is beyond it."""
    exponents = sorted(counts, reverse=upper)
    seen = itertools.accumulate(counts[e] for e in exponents)
    return next((e for e, n in zip(exponents, seen, strict=True) if n > share * counts.total()), exponents[0])


def _totals(tensors: Sequence[ProbedRecord]) -> dict[str, Counter[int]]:
    totals: dict[str, Counter[int]] = {}
    for t in tensors:
        if t.exponents:
            totals.setdefault(t.words, Counter()).update(dict(t.exponents))
    return totals


def _exponent_chart(
    words: str, counts: Counter[int], span: tuple[int, int], windows: Sequence[Format], scaled: tuple[int, str]
) -> Chart:
    """The share of elements at each exponent; `scaled` is the shift by the loss scale in binades, and its label."""
    low, high = span
    shares = [(e, counts[e] / counts.total()) for e in range(max(low, min(counts)), max(counts) + 1)]
    top, (shift, label) = 1.05 * max(share for _, share in shares), scaled
    outline = [(e + shift + side, share) for e, share in shares for side in (0, 1)]
    moved = Mark(kind="outline", shape="line", title=label, points=((outline[0][0], 0), *outline, (outline[-1][0], 0)))
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
    low, high = _edge(counts, 0.01), _edge(counts, 0.01, upper=True)
    below = sum(n for e, n in counts.items() if e < axis_low)
    rest = f" {share_text(below, counts.total())} are below the axis." if below else ""
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
        losses=tuple(
            Loss(
                layer=t.layer,
                block=report.formats[i],
                column=t.words,
                underflow=t.plain[i].underflow,
                overflow=t.plain[i].overflow,
                title=f"{t.words} of {t.layer} in {report.formats[i]}",
            )
            for i in shown
            for t in report.tensors
        ),
    )
