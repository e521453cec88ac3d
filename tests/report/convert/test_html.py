"""The HTML report is one readable file: summary, verification, plots, tables, provenance, and nothing from outside."""

import dataclasses
import hashlib
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from report_examples import bert_result, calibrated_result, llama_result

import lpconv.report.page
from lpconv.report.convert.html import html_compare, html_report
from lpconv.report.convert.plot import rms_plot, sqnr_plot
from lpconv.report.plot import FormatRange
from lpconv.results import ByteCounts, ConvertResult, GateRecord, LogitsCheck, SourceRecord, VerifyResult

RANGES = {
    "fp16": FormatRange(max=65504.0, min_normal=2.0**-14, min_subnormal=2.0**-24),
    "bf16": FormatRange(max=3.3895e38, min_normal=2.0**-126, min_subnormal=2.0**-133),
    "e4m3fn": FormatRange(max=448.0, min_normal=2.0**-6, min_subnormal=2.0**-9),
}
VOID = {"meta", "input", "wbr", "br", "link", "img"}
BLOCKS = {"title", "h1", "h2", "h3", "p", "li", "dt", "dd", "th", "td", "text", "figcaption"}


class Page(HTMLParser):
    """What a browser would see: the elements, the text of each kind of element, and whether every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.stack: list[str] = []
        self.feed(html)
        self.close()
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in BLOCKS:
            self.texts.append(("", " "))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def words(self) -> str:
        """The text that a person reads, without line breaks."""
        return " ".join("".join(text for tag, text in self.texts if tag not in ("script", "style")).split())

    def classes(self, tag: str) -> list[str]:
        return [attrs.get("class") or "" for name, attrs in self.tags if name == tag]


def report(result: ConvertResult) -> Page:
    return Page(html_report(result, RANGES))


def hostile_result() -> ConvertResult:
    name = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'\u202e\x00"
    tensors = tuple(replace(t, name=name + t.name, reason=name) for t in bert_result().tensors[:5])
    return bert_result(
        tensors=tensors, output=f"out/{name}", source=SourceRecord(name=name, resolved=name), command=name,
        options={name: name}, warnings=(name,), architecture=name,
        verify=VerifyResult(level="logits", passed=False, logits=LogitsCheck(skipped=name), problems=(name,)),
    )  # fmt: skip


def test_a_person_finds_the_answers() -> None:
    words = report(bert_result()).words()
    for answer in (
        "sentence-transformers/all-MiniLM-L6-v2 (BertModel) was rewritten with unit scaling: 40 of 104 tensors",
        "The weights went from 90.9 MB to 45.5 MB (2.00x smaller).",
        "The smallest signal-to-noise ratio of a tensor is 72.2 dB (encoder.layer.0.attention.self.key.weight)",
        "Verification: passed (level logits)",
        "14 files match SHA256SUMS",
        "fp16 from 2⁻¹⁴ to 65504",
        "1-D: norms and biases keep their format",
        "encoder.layer.5",
        "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        "Version of torch 2.13.0",
        "Option scale pow2",
        "lpconv convert sentence-transformers/all-MiniLM-L6-v2 --method unit --format fp16",
    ):
        assert answer in words


def test_a_calibration_says_on_what_and_what_it_found() -> None:
    """And that no figure has what rounding inputs costs. No column is of dashes alone."""
    page = report(calibrated_result())
    for answer in (
        "Inputs have scales in the file, calibrated on 4,096 tokens of plays.txt.",
        "what rounding them costs comes on top",
        "relative error to the source's, inputs not rounded",
        "Inputs calibrated on plays.txt, 4,096 tokens in windows of 128, SHA-256 abab",
    ):
        assert answer in page.words()
    heads, plain = ([text for tag, text in p.texts if tag == "th"] for p in (page, report(bert_result())))
    assert ("Largest input" in heads, "Scale" in heads) == (True, False)
    assert ("Largest input" in plain, "Scale" in plain) == (False, True)
    cells = [text for tag, text in page.texts if tag == "td"]
    assert [cells.count(text) for text in ("7.25", "8.25", "9.25")] == [1, 1, 1]


def test_every_tensor_has_its_row() -> None:
    result = bert_result()
    words = report(result).words()
    assert all(t.name in words for t in result.tensors)


@pytest.mark.parametrize("page", [html_report(llama_result(), RANGES), html_compare([bert_result()] * 2, RANGES)])
def test_nothing_comes_from_outside(page: str) -> None:
    assert not re.search(r'https?:|//[a-z]|@import|url\(|\bsrc=|\bhref="[^#]', page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("page", [html_report(hostile_result(), RANGES), html_compare([hostile_result()] * 2, RANGES)])
def test_hostile_names_stay_text(page: str) -> None:
    seen = Page(page)
    tags = [tag for tag, _ in seen.tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert not any(name.startswith("on") for _, attrs in seen.tags for name in attrs)
    assert "<script>alert(1)</script>" in seen.words()
    assert "\x00" not in page
    assert "\u202e" not in page


def test_before_and_after_are_drawn_over_the_range() -> None:
    page = report(bert_result())
    marks = page.classes("path")
    assert marks.count("mark before") == marks.count("mark after") == 40 + 1, "each converted tensor, and the legend"
    assert page.classes("rect").count("band normal") == 1
    assert page.classes("rect").count("band subnormal") == 1
    plot = rms_plot(bert_result(), RANGES)
    assert plot is not None
    after = next(m for m in plot.marks if m.title == "pooler.dense.weight: RMS as stored, fp16")
    ticks = {t.label: t.position for t in plot.y_ticks}
    exponent = (ticks["2^0"] - float(after.path.split()[1].split("a")[0])) / (ticks["2^0"] - ticks["2^5"]) * 5
    assert 0 <= exponent < 1, "the RMS of the codes is in [1, 2)"


def test_each_format_shades_its_own_tensors() -> None:
    page = report(llama_result())
    bands = [attrs for tag, attrs in page.tags if tag == "rect" and attrs.get("class") == "band normal"]
    assert len(bands) == 3, "fp16 embeddings, e4m3fn layers, fp16 head"
    edges = [(float(b["x"] or 0), float(b["x"] or 0) + float(b["width"] or 0)) for b in bands]
    assert all(right == pytest.approx(left) for (_, right), (left, _) in pairwise(edges))


def test_codes_of_many_scales_are_not_drawn_by_one() -> None:
    result = bert_result()
    assert rms_plot(dataclasses.replace(result, options={**result.options, "granularity": "row"}), RANGES) is None


def test_values_without_a_scale_have_no_before() -> None:
    page = report(bert_result("bf16", "collage"))
    assert "mark before" not in page.classes("path")
    assert "Weight RMS in the format" in page.words()


def test_a_format_without_a_range_is_still_plotted() -> None:
    page = Page(html_report(bert_result(), {}))
    assert "mark after" in page.classes("path")
    assert not [c for c in page.classes("rect") if "band" in c]


def test_plots_have_names_and_descriptions() -> None:
    page = report(bert_result())
    plots = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    ids = {attrs.get("id") for _, attrs in page.tags}
    assert len(plots) == 2
    assert all(set((p["aria-labelledby"] or "").split()) <= ids for p in plots)


def test_exact_tensors_lie_on_a_line_of_their_own() -> None:
    tensors = tuple(replace(t, sqnr_db=math.inf, max_rel_error=0.0) for t in bert_result("fp32").tensors)
    page = report(bert_result("fp32", tensors=tensors))
    assert "exact" in [text for tag, text in page.texts if tag == "text"]
    assert "Every measured tensor holds its source exactly." in page.words()


def test_flat_ratios_are_a_sentence_instead_of_a_plot() -> None:
    tensors = tuple(replace(t, sqnr_db=31.5) for t in bert_result().tensors)
    page = report(bert_result(tensors=tensors))
    assert "Signal-to-noise ratios lie close together: 31.5 dB in" in page.words()
    assert "Signal-to-noise ratio of every converted tensor" not in page.words()


@pytest.mark.parametrize(
    ("passed", "words"), [(True, "Verified: outputs are within"), (False, "Verification failed: ")]
)
def test_the_first_line_is_the_verdict(passed: bool, words: str) -> None:
    verify = bert_result().verify
    page = html_report(bert_result(verify=replace(verify, passed=passed)), {})
    banner = page.partition('<p class="box banner ')[2].partition("</p>")[0]
    assert banner.startswith("passed" if passed else "failed")
    assert words in banner


def test_odd_figures_do_not_break_the_plots() -> None:
    first, *rest = (t for t in bert_result().tensors if t.action == "convert")
    odd = [
        replace(first, name="zeros", rms=0.0, absmax=0.0, scale=0.0, sqnr_db=math.inf),
        replace(first, name="empty", shape=(0, 4), rms=None, absmax=None, sqnr_db=None),
        replace(first, name="nan", rms=math.nan, absmax=math.inf, scale=math.inf, sqnr_db=math.nan, num_nan=3),
        replace(first, name="noise", sqnr_db=-math.inf),
        replace(first, name="negative", scale=-0.5),
        replace(first, name="scalar", shape=()),
    ]
    page = report(bert_result(tensors=(*odd, *rest)))
    assert all(t.name in page.words() for t in odd)
    assert "NaN, Inf" in page.words()


@pytest.mark.parametrize(
    "verify",
    [
        VerifyResult(level="none", passed=True),
        VerifyResult(level="logits", passed=True, logits=LogitsCheck(skipped="no config.json")),
        VerifyResult(
            level="weights", passed=False, gates=(GateRecord(expression="top1>=1", value=None, passed=False),)
        ),
    ],
)
def test_missing_fields_and_no_tensors(verify: VerifyResult) -> None:
    result = bert_result(
        tensors=(), files=(), side_files=(), bytes=ByteCounts(read=0, written=0), seconds=0.0, verify=verify,
        source=SourceRecord(name="x", resolved="x"), architecture=None, command=None, options={}, versions={},
    )  # fmt: skip
    for words in (report(result).words(), Page(html_compare([result, result], RANGES)).words()):
        assert "0 of 0 tensors became fp16" in words
        assert "None" not in words
    assert "The checkpoint holds no tensors." in report(result).words()


def test_a_failure_cannot_be_overlooked() -> None:
    failed = VerifyResult(level="weights", passed=False, problems=("gate sqnr>=80: the value is 72.2",))
    page = report(bert_result(verify=failed))
    assert "Verification: failed" in page.words()
    assert "gate sqnr>=80: the value is 72.2" in page.words()
    assert "box failed" in page.classes("section")


def test_compare_sets_the_runs_side_by_side() -> None:
    page = Page(html_compare([bert_result(), bert_result("e4m3fn"), llama_result()], RANGES))
    words = page.words()
    assert "3 runs compared" in words
    assert "smallest SQNR, dB 72.2 30.1 30.0" in words
    assert {"mark series-0", "mark series-1", "mark series-2"} <= set(page.classes("path"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)), "ids are unique, plots of several runs included"


def test_no_run_hides_an_equal_one() -> None:
    result = bert_result()
    plot = sqnr_plot([("a", result.tensors), ("b", result.tensors)])
    assert plot is not None
    places = [re.findall(r"[-\d.]+", mark.path)[0] for mark in plot.marks]
    assert len(set(places)) == len(places) == 2 * sum(t.sqnr_db is not None for t in result.tensors)
    finer = [bert_result(options={"granularity": g, "layout": "lpconv"}) for g in ("tensor", "row")]
    assert "granularity tensor row layout lpconv lpconv" in Page(html_compare(finer, RANGES)).words()


def test_equal_results_give_equal_bytes() -> None:
    code = (
        "import hashlib, report_examples as e; from test_html import RANGES; from lpconv.report.convert.html import *;"
        "print(hashlib.sha256(html_report(e.llama_result(), RANGES).encode()).hexdigest())"
    )
    here = hashlib.sha256(html_report(llama_result(), RANGES).encode()).hexdigest()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": path}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here


def test_rendering_loads_no_heavy_library() -> None:
    code = (
        "import sys, lpconv.report.convert.html;"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'numpy', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2.2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out_in_both_themes(theme: str) -> None:
    """WCAG 2.2: contrast of at least 4.5 for text and 3 for what a plot's reader must tell apart."""
    page = html_report(bert_result(), RANGES)
    blocks = re.findall(r":root \{(.*?)\}", page, flags=re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[0 if theme == "light" else 1]))

    def contrast(a: str, b: str) -> float:
        low, high = sorted((luminance(colours[a]), luminance(colours[b])))
        return (high + 0.05) / (low + 0.05)

    text = [(ink, ground) for ink in ("ink", "quiet") for ground in ("page", "panel")]
    text += [(name, f"{name}-fill") for name in ("good", "bad", "note")]
    text += [("ink", ground) for ground in ("good-fill", "bad-fill", "note-fill", "normal", "subnormal")]
    assert {pair: contrast(*pair) for pair in text if contrast(*pair) < 4.5} == {}
    marks = [(mark, ground) for mark in ("after", "before") for ground in ("page", "normal", "subnormal")]
    marks += [(f"series-{i}", "page") for i in range(6)]
    assert {pair: contrast(*pair) for pair in marks if contrast(*pair) < 3} == {}


def test_nothing_outside_a_scrolled_box_asks_for_more_width_than_a_phone_has() -> None:
    style = (Path(lpconv.report.page.__file__).parent / "templates/style.css").read_text(encoding="utf-8")
    grids = re.findall(r"grid-template-columns: (.*?);", style.partition("@media (max-width")[0])
    widths = [float(w) for tracks in grids for w in re.findall(r"minmax\((\d+)rem", tracks)]
    assert grids
    assert not [w for w in widths if 16 * w > 360], grids
