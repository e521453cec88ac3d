"""What a probe's page and terminal report say, from records alone."""

import math
import re
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import pytest
from test_html import RANGES, Page

from lpconv.report.probe.html import exponent_plots, heatmap, html_probe
from lpconv.report.probe.terminal import render_probe, render_what_if
from lpconv.report.terminal import show
from lpconv.results import FormatRates, LossScaleRecord, ProbedRecord, ProbeReport

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
            *(tensor(layer, "output gradient", under=lost) for layer, lost in losses.items()),
        ),
        loss_scales=(
            LossScaleRecord(format="fp16", log2_scale=7, max_log2_scale=12, worst_underflow_before=0.6,
                            worst_underflow_after=0.0005),
            LossScaleRecord(format="e4m3fn", log2_scale=3, max_log2_scale=3, worst_underflow_before=1.0,
                            worst_underflow_after=0.25),
        ),
        findings={"fp16": ("output gradient of lm_head: 60 % underflow in fp16 at loss scale 1",), "e4m3fn": ()},
        warnings=("not in the checkpoint, so random here: pooler.weight",),
    )  # fmt: skip


def only_fp16() -> ProbeReport:
    tensors = tuple(replace(t, plain=t.plain[:1], scaled=t.scaled[:1]) for t in report().tensors)
    return replace(report(), formats=("fp16",), tensors=tensors, loss_scales=report().loss_scales[:1])


def printed(found: object, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    out = StringIO()
    show(found, file=out)  # type: ignore[arg-type]  # any renderable
    return out.getvalue()


def test_the_terminal_answers_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(render_probe(report()), 80, monkeypatch)
    assert max(map(len, text.splitlines())) <= 80
    for answer in (
        "60 % underflow in fp16 at loss scale 1",
        "Nothing is lost.",
        "2.5, 2.25",
        "4 of 4 steps recorded, which took 12.5 % of the steps' own time",
        "pooler.weight",
        "No loss scale brings every gradient to 0.1 % in e4m3fn",
    ):
        assert answer in " ".join(text.split())
    assert re.search(r"fp16 +2\^7 +2\^12 +60 % +0.05 %", text)
    assert re.search(r"weight +3 \(4\) of 4 +3 \(4\) of 4", text)  # a scale of its own saves what is beyond the range
    assert re.search(r"output gradient +4 of 4 +4 of 4", text)  # at the recommended scale


def test_what_if_lists_every_tensor_worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(render_what_if(report()), 80, monkeypatch)
    gradients, weights = text.split("Weight in fp16")
    order = [gradients.index(layer) for layer in (LAYERS[3], LAYERS[1], LAYERS[2], LAYERS[0])]
    assert order == sorted(order)
    assert weights.index("lm_head") < weights.index(LAYERS[0])
    assert "Output gradient in fp16 at loss scale 1" in gradients


def test_a_record_without_gradients_or_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(report(), classes=("weight",), tensors=report().tensors[:3], loss_scales=(), losses=(), findings={})
    assert "No gradient was recorded." in printed(render_probe(bare), 80, monkeypatch)
    page = Page(html_probe(bare, RANGES)).words()
    assert "Nothing is lost." in page
    assert "What is lost, by layer and class" not in page  # nothing is
    empty = replace(bare, tensors=(), classes=())
    assert "bert-large" in Page(html_probe(empty, RANGES)).words()
    printed(render_what_if(empty), 80, monkeypatch)


def test_the_page_answers_and_loads_nothing() -> None:
    text = html_probe(report(), RANGES)
    page = Page(text)
    words = page.words()
    for answer in (
        "60 % underflow in fp16 at loss scale 1",
        "No loss scale brings every gradient to 0.1 % in e4m3fn",
        "at loss scale 2⁷, recommended for fp16",
        "corpus.txt",
        "pooler.weight",
        "12.5 %",
    ):
        assert answer in words
    assert all(layer in words for layer in LAYERS)
    assert not re.search(r'https?:|//[a-z]|@import|url\(|\bsrc=|\bhref="[^#]', text)
    assert len(page.classes("svg")) - page.classes("svg").count("") == 4  # two histograms, held tensors, the heatmap


def test_a_hostile_name_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "</title></svg><script>alert(1)</script>\u202e\x1b[31m"
    hostile = replace(
        report(), name=name, facts={name: name}, findings={"fp16": (name,), "e4m3fn": (name,)}, warnings=(name,),
        tensors=tuple(replace(t, layer=name + t.layer) for t in report().tensors),
    )  # fmt: skip
    assert [tag for tag, _ in Page(html_probe(hostile, RANGES)).tags].count("script") == 1
    assert "\x1b" not in printed(render_what_if(hostile), 80, monkeypatch)


def test_windows_stand_below_the_elements_they_hold() -> None:
    plots = {p.title: p for p in exponent_plots(report(), RANGES)}
    plot = plots["Weight"]
    ticks = {t.label: t.position for t in plot.x_ticks}
    subnormal, normal, _, e4m3fn = (b for b in plot.bands if b.kind != "bar")
    assert (subnormal.kind, normal.kind) == ("subnormal", "normal")
    assert normal.x == pytest.approx(subnormal.x + subnormal.width, abs=0.2)  # 2^-14, where normal numbers begin
    unit = (ticks["2^0"] - ticks["2^-16"]) / 16
    assert normal.x == pytest.approx(ticks["2^0"] - 14 * unit, abs=0.2)
    assert e4m3fn.x == pytest.approx(ticks["2^0"] - 6 * unit, abs=0.2)
    assert [t.label for t in plot.y_ticks if not t.has_line] == ["fp16", "e4m3fn"]
    by_height = sorted((b for b in plot.bands if b.kind == "bar"), key=lambda b: b.height)
    assert by_height[-1].x == pytest.approx(ticks["2^-16"] - 3 * unit, abs=0.2)  # the 70 % at 2^-19
    share = {t.label: t.position for t in plot.y_ticks}
    percents = (share["0 %"] - share["20 %"]) / 20
    assert by_height[-1].height == pytest.approx(70.7 * percents, rel=0.01)
    assert by_height[-1].height / by_height[0].height == pytest.approx(7, rel=0.02)


def test_the_outline_is_the_gradient_moved_by_the_loss_scale() -> None:
    plots = {p.title: p for p in exponent_plots(report(), RANGES)}
    assert plots["Weight"].marks == ()
    gradient = plots["Output gradient"]
    first = gradient.bands[0]
    (outline,) = gradient.marks
    start = float(outline.path[1:].split()[0])
    assert start == pytest.approx(first.x + 7 * first.width, abs=0.5)
    assert "H" not in outline.path
    steps = [tuple(map(float, point.split())) for point in outline.path[1:].split("L")]
    assert all(x == u or y == v for (x, y), (u, v) in pairwise(steps)), "across or up, also where nothing lies"


def test_the_heatmap_has_a_cell_for_each_tensor_and_format() -> None:
    heat = heatmap(report())
    assert heat is not None
    assert len(heat.cells) == 2 * len(report().tensors)
    assert len({(c.x, c.y) for c in heat.cells}) == len(heat.cells)
    cells = {c.title.split(":")[0]: c for c in heat.cells}
    assert cells["output gradient of lm_head in fp16"].kind == "under depth-4"
    assert cells["output gradient of lm_head in fp16"].text == "60"
    assert cells["output gradient of model.layers.1.self_attn.q_proj in fp16"].text == ""
    assert cells["weight of lm_head in fp16"].kind == "over depth-2"
    assert cells["weight of lm_head in fp16"].text == "2↑"  # said without colour too
    assert cells["weight of model.embed_tokens in e4m3fn"].kind.endswith("depth-none")
    assert [b.label for b in heat.blocks] == ["fp16", "e4m3fn"]
    assert max(c.x + heat.cell_width for c in heat.cells) <= heat.width


def test_a_tensor_without_signal_has_a_rate_and_no_ratio() -> None:
    silent = replace(tensor("a", "weight"), exponents=(), plain=(rates("fp16", sqnr=math.nan),) * 2)
    page = html_probe(replace(report(), tensors=(silent, *report().tensors)), RANGES)
    assert ">nan<" not in page.lower()


def test_a_few_tiny_outliers_do_not_squeeze_the_axis() -> None:
    outliers = replace(tensor("a", "weight"), exponents=((-120, 1), (-10, 9_999)))
    (plot,) = exponent_plots(replace(report(), classes=("weight",), tensors=(outliers,), loss_scales=()), RANGES)
    assert len([b for b in plot.bands if b.kind == "bar"]) == 1
    assert "0.01 % lie below the axis" in plot.description


def test_the_table_has_a_row_for_each_tensor_and_subnormals_where_there_is_room() -> None:
    both = html_probe(report(), RANGES)
    alone = html_probe(replace(only_fp16(), name="models/bert-large"), RANGES)
    for text, columns in ((both, 3 + 2 * 2 + 1), (alone, 3 + 3 + 1)):
        table = text[text.index('<table id="tensors"') :].partition("</table>")[0]
        assert table.partition("</thead>")[0].count("<th ") == columns
        assert table.count("<tr><td") == len(report().tensors)
    assert "<h1>bert-large</h1>" in alone
    assert "models/bert-large" in alone
