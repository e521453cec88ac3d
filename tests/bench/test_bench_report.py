"""A bench as a page and a table, from records."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
from bench_records import CPU_PEAKS, GEMMS, result, row
from rich.console import Console

from lpconv.bench.roofline import verdict
from lpconv.report.bench.html import html_bench, memory_plot, speed_plot
from lpconv.report.bench.terminal import render_bench
from lpconv.report.bench.text import labels, notes
from lpconv.results import BenchResult, BenchRow, from_json, to_json

ROWS = (row("plain"), row("static"), row("te", status="skipped", reason="<b>not</b> installed", ratio=(1, 1, 1)))


def shown(*rows: BenchRow) -> BenchResult:
    found = verdict(rows, GEMMS, CPU_PEAKS)
    assert found is not None
    made = result(*rows)
    return from_json(BenchResult, to_json(made) | {"verdicts": [to_json(found)]})


def test_a_bench_survives_json() -> None:
    made = result(*ROWS)

    assert from_json(BenchResult, json.loads(json.dumps(to_json(made)))) == made


def test_the_terminal_shows_rows_memory_linears_and_the_verdict() -> None:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(render_bench(shown(*ROWS)))
    text = console.export_text()

    for words in ("1.30 [1.20, 1.40]", "weights 10 %", "14336", "emulated here", "<b>not</b> installed", "1.00 kB"):
        assert words in text


@pytest.mark.parametrize(("ratio", "word"), [((0.36, 0.3, 0.4), "slower here"), ((1.3, 1.2, 1.4), "fastest")])
def test_the_headline_says_whether_anything_was_faster(ratio: tuple[float, float, float], word: str) -> None:
    made = result(row("plain"), row("static", ratio=ratio), row("rowwise", ratio=(0.2, 0.1, 0.3)))
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(render_bench(made))
    page, other = html_bench(made), {"fastest", "slower here"} - {word}
    assert console.export_text().splitlines()[0].startswith(f"lpconv bench, {word}: fp8 static, {ratio[0]:.2f}")
    assert f"{word}: fp8 static, {ratio[0]:.2f}" in page
    assert f"{word.capitalize()}, against the baseline" in page
    assert not any(w in page.lower() for w in other)


def test_rows_without_figures_share_a_reason_and_do_not_name_the_device() -> None:
    lost = [row(m, status="too large", reason="no room", timing=None, device="cpu") for m in ("te", "mx")]
    console = Console(width=140, file=io.StringIO(), record=True)

    console.print(render_bench(result(*lost, row("plain"))))

    text = console.export_text()
    assert "fp8 te; fp8 mx: too large, no room" in text
    assert re.search(r"Device +GPU", text)


def test_random_weights_are_noted() -> None:
    made = result(row("plain", weights="16 of 58 parameters random, else checkpoint"))
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(render_bench(made))
    for text in (console.export_text(), html_bench(made)):
        assert "llama-8b: 16 of 58 parameters random, so errors of outputs and gradients are not its own" in text
    assert "random" not in " ".join(notes(result(row("plain", weights="checkpoint"))))


def test_the_page_has_plots_and_no_markup_from_outside() -> None:
    page = html_bench(shown(*ROWS))

    HTMLParser().feed(page)
    assert page.count('<svg class="plot"') == 2
    assert "<b>not</b>" not in page
    assert "&lt;b&gt;not&lt;/b&gt; installed" in page
    assert not re.search(r'(src|href)="http', page)


def test_an_interval_is_drawn_around_its_value_and_columns_reach_the_peak() -> None:
    named = list(zip(labels(ROWS), ROWS, strict=True))
    speed, memory = speed_plot(named), memory_plot(named)

    assert speed is not None
    assert memory is not None
    whisker = next(m for m in speed.marks if m.kind == "peak")
    low, high = map(float, re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", whisker.path)[0])
    parity = float(speed.marks[0].path[1:].split()[0])
    assert parity < low < high  # 1.20 to 1.40, all faster than the baseline
    assert "1.30 [1.20, 1.40]" in [t.text for t in speed.texts]
    assert [m.title for m in memory.legend] == ["weights", "gradients", "optimizer", "activations", "other"]
    assert len([m for m in memory.marks if m.kind == "series-0"]) == 3
    assert max(float(re.findall(r"H([\d.]+)v", m.path)[0]) for m in memory.marks) < memory.right
    assert speed_plot(named[:1]) is None
