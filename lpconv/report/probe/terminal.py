"""A probe's answers on the terminal: the worst first and in words, then loss scales, then which formats fit where.

Import this module lazily: it loads rich.
"""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.numbers import number_text, plural, share_text, sqnr_text
from lpconv.report.printable import printable_record
from lpconv.report.probe.words import (
    ALONE_WORDS,
    FIT_WORDS,
    LOSS_SCALE_COLUMNS,
    capped_words,
    fit_rows,
    loss_scale_rows,
    tracking_words,
    worst_first,
)
from lpconv.report.terminal import Name, after_gap, facts_grid, heading, note_list, section, table_of
from lpconv.results import ProbedRecord, ProbeReport


def render_probe(report: ProbeReport) -> RenderableType:
    """What was run, what each format would lose, the loss scales, and which formats fit which class of tensor."""
    report = printable_record(report)
    return Group(*_head(report), *_findings(report), *_ending(report))


def render_what_if(report: ProbeReport) -> RenderableType:
    """The first of the report's formats in detail: every tensor, worst first."""
    report = printable_record(report)
    return Group(*_head(report), *_every_tensor(report), *_ending(report))


def _ending(report: ProbeReport) -> tuple[RenderableType, ...]:
    at_risk = note_list("Operands at risk in fp8", report.at_risk)
    return (*_loss_scales(report), *_fits(report), *at_risk, *note_list("Warnings", report.warnings))


def _head(report: ProbeReport) -> tuple[RenderableType, ...]:
    losses = ", ".join(number_text(loss) for loss in report.losses[:4])
    more = f" and {plural(len(report.losses) - 4, 'more step')}" if len(report.losses) > 4 else ""
    facts = dict(report.facts)
    if losses:
        facts["Loss"] = f"{losses}{more}" + (f": {facts['Loss']}" if "Loss" in facts else "")
    facts["Tracking"] = tracking_words(report)
    text = report.facts.get("Text", "")
    title = f"Measured on {text}: {report.name}" if text.startswith("random ids") else report.name
    return (*heading(title), facts_grid(facts))


def _findings(report: ProbeReport) -> tuple[RenderableType, ...]:
    parts: list[RenderableType] = []
    for name in report.formats:
        parts += note_list(f"Worst in {name}", report.findings.get(name, ()), empty="Nothing is lost.")
    if any("loss scale" in f for found in report.findings.values() for f in found):
        parts.append(after_gap(Text(ALONE_WORDS)))
    return tuple(parts)


def _loss_scales(report: ProbeReport) -> tuple[RenderableType, ...]:
    if not report.loss_scales:
        return section("Loss scale", Text("No gradient was recorded."))
    table = table_of(*LOSS_SCALE_COLUMNS, rows=loss_scale_rows(report))
    capped = capped_words(report)
    body = Group(table, after_gap(Text(capped))) if capped else table
    return section("Recommended loss scale, for the worst gradient of the model", body)


def _fits(report: ProbeReport) -> tuple[RenderableType, ...]:
    table = table_of("Class", *report.formats, rows=fit_rows(report))
    return section("Tensors that each format holds", Group(table, after_gap(Text(FIT_WORDS))))


def _every_tensor(report: ProbeReport) -> tuple[RenderableType, ...]:
    """A table for each class of tensor, worst first in both."""
    tensors = worst_first(report.tensors)
    parts: list[RenderableType] = []
    for words in dict.fromkeys(t.words for t in tensors):
        members = [t for t in tensors if t.words == words]
        rows: Iterable[tuple[str | Name, ...]] = ((Name(name=t.layer), *_cells(t)) for t in members)
        table = table_of("Layer", "To zero", "Subnormal", "Beyond range", "SQNR dB", rows=rows)
        scaled = " at loss scale 1" if members[0].is_gradient else ""
        parts += section(f"{words[:1].upper()}{words[1:]} in {report.formats[0]}{scaled}", table)
    return tuple(parts)


def _cells(tensor: ProbedRecord) -> tuple[str, ...]:
    rates = tensor.plain[0]
    shares = (share_text(share, 1) for share in (rates.underflow, rates.subnormal, rates.overflow))
    return (*shares, sqnr_text(rates.sqnr_db))
