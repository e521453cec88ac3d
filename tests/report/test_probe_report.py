"""A probe as a document, from records alone."""

import re
from dataclasses import replace
from typing import Any

import pytest

from lpconv.report.document import Document, Section, Table
from lpconv.report.html import html
from lpconv.report.numbers import ROLE_WORDS
from lpconv.report.probe import exponent_charts, heat_map, probe_document
from lpconv.report.terminal import terminal
from lpconv.results import FormatRates, LossScaleRecord, ProbedRecord, ProbeReport
from tests.helpers.report_examples import section_of, verdict_of

LAYERS = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head")


def rates(name: str, *, under: float = 0.0, over: float = 0.0, sqnr: float = 60.0, scale: int = 0) -> FormatRates:
    return FormatRates(
        format=name, log2_loss_scale=scale, underflow=under, subnormal=under / 2, overflow=over, sqnr_db=sqnr,
        fits=under + over <= 1e-3, fits_own_scale=under <= 1e-3,
    )  # fmt: skip


def tensor(layer: str, words: str, *, under: float = 0.0, over: float = 0.0) -> ProbedRecord:
    gradient = "gradient" in words
    plain = (rates("fp16", under=under, over=over), rates("e4m3fn", under=min(2 * under, 1.0), over=over))
    return ProbedRecord(
        layer=layer, role=words.replace(" ", "_"), words=words, is_gradient=gradient, num_elements=1000, num_zero=10,
        num_nonfinite=0, exponents=((-20, 100), (-19, 700), (-2, 190)), plain=plain,
        scaled=tuple(rates(r.format, scale=7) for r in plain) if gradient else plain,
    )  # fmt: skip


def report() -> ProbeReport:
    losses = {LAYERS[0]: 0.0, LAYERS[1]: 0.19, LAYERS[2]: 0.004, LAYERS[3]: 0.6}
    return ProbeReport(
        name="bert-large", facts={"Model": "BertForMaskedLM", "Text": "corpus.txt"}, formats=("fp16", "e4m3fn"),
        classes=("weight", "output gradient"), steps_seen=4, steps_recorded=4, losses=(2.5, 2.25), overhead=0.125,
        tensors=(
            *(tensor(layer, "weight") for layer in LAYERS[:3]), tensor(LAYERS[3], "weight", over=0.02),
            *(tensor(layer, ROLE_WORDS["grad_output"], under=lost) for layer, lost in losses.items()),
        ),
        loss_scales=(
            LossScaleRecord(format="fp16", log2_scale=7, max_log2_scale=12, worst_underflow_before=0.6,
                            worst_underflow_after=0.0005),
            LossScaleRecord(format="e4m3fn", log2_scale=3, max_log2_scale=3, worst_underflow_before=1.0,
                            worst_underflow_after=0.25),
        ),
        findings={"fp16": ("output gradient of lm_head: 60 % underflow in fp16 at loss scale 1",), "e4m3fn": ()},
        warnings=("not in the checkpoint, so filled with random numbers: pooler.weight",),
    )  # fmt: skip


def described(**changes: Any) -> Document:
    return probe_document(replace(report(), **changes))


def only_table(section: Section) -> Table:
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return table


def test_the_verdict_counts_what_each_format_holds() -> None:
    document = described()
    assert verdict_of(document).outcome == "passed"
    assert re.search(r"8 tensors.* fp16 \w+ 8, e4m3fn \w+ 8$", verdict_of(document).text)
    drawn = verdict_of(described(facts={"Text": "random token ids, seed 0"}))
    assert "random" in drawn.text
    none = tuple(replace(t, scaled=(t.scaled[0], replace(t.scaled[1], fits_own_scale=False))) for t in report().tensors)
    failed = verdict_of(described(tensors=none))
    assert failed.outcome == "not run"
    assert re.search(r"8, e4m3fn \w+ 0 .*lm_head", failed.text)


def test_losses_scales_and_fits_are_told() -> None:
    document = described()
    assert section_of(document, "Worst in fp16").blocks[0] == report().findings["fp16"]
    assert len(section_of(document, "Worst in e4m3fn").blocks) == 1
    assert document.facts["Loss"] == "2.5, 2.25"
    assert "corpus.txt" in document.subtitle
    scales = section_of(document, "Recommended loss scale, for the worst gradient of the model")
    assert only_table(scales).rows[0] == ("fp16", "2^7", "2^12", "60 %", "0.05 %")
    assert re.search(r"e4m3fn.* 0\.1 %", str(scales.blocks[-1]))
    fits = only_table(section_of(document, "Tensors that each format holds"))
    assert fits.rows[0] == ("weight", "3 (4) of 4", "3 (4) of 4")  # a scale of its own saves what is beyond the range
    assert fits.rows[1] == (ROLE_WORDS["grad_output"], "4 of 4", "4 of 4")  # at the recommended scale


def test_one_format_lists_every_tensor_worst_first_on_the_terminal_too() -> None:
    tensors = tuple(replace(t, plain=t.plain[:1], scaled=t.scaled[:1]) for t in report().tensors)
    alone = described(formats=("fp16",), tensors=tensors, loss_scales=report().loss_scales[:1])
    section = section_of(alone, "Every tensor in fp16, the worst first")
    assert section.only is None
    table = only_table(section)
    assert [row[0] for row in table.rows][:4] == [LAYERS[3], LAYERS[1], LAYERS[3], LAYERS[2]]
    assert table.columns[5] == "SQNR"
    both = section_of(described(), "Every tensor")
    assert both.only == "page"
    assert len(only_table(both).rows) == len(report().tensors)
    assert all(len(row) == len(only_table(both).columns) for row in only_table(both).rows)


def test_a_record_without_gradients_losses_or_tensors() -> None:
    bare = {"classes": ("weight",), "tensors": report().tensors[:3], "loss_scales": (), "losses": (), "findings": {}}
    document = described(**bare)
    assert all(isinstance(block, str) for block in document.sections[2].blocks)
    assert not any("lost" in s.title for s in document.sections)  # nothing is
    empty = described(**bare | {"tensors": (), "classes": ()})
    assert html(empty)
    assert terminal(empty)


def test_windows_stand_below_the_elements_they_hold() -> None:
    charts = {c.title: c for c in exponent_charts(report())}
    chart = charts["Weight"]
    subnormal, normal, _, e4m3fn = (b for b in chart.boxes if b.kind != "bar")
    assert (subnormal.kind, normal.kind) == ("subnormal", "normal")
    assert (subnormal.x[1], normal.x[0], e4m3fn.x[0]) == (-14, -14, -6)
    assert 0 > normal.y[1] > normal.y[0] > e4m3fn.y[1] > e4m3fn.y[0] > chart.y.low
    assert [t.label for t in chart.y.ticks if not t.has_line] == ["fp16", "e4m3fn"]
    bars = {b.x: b.y for b in chart.boxes if b.kind == "bar"}
    assert bars[-19, -18] == pytest.approx((0, 700 / 990))
    assert max(share for _, share in bars.values()) < chart.y.high


def test_the_heat_map_has_a_cell_for_each_tensor_and_format() -> None:
    heat = heat_map(report())
    assert heat is not None
    assert heat.blocks == ("fp16", "e4m3fn")
    cells = {(loss.block, loss.layer, loss.column): loss.underflow + loss.overflow for loss in heat.losses}
    assert len(cells) == len(heat.losses) == 2 * len(report().tensors)
    assert cells["fp16", "lm_head", ROLE_WORDS["grad_output"]] == 0.6
    assert re.search(r"^fp16: .*60 %, .* lm_head", heat.description)
