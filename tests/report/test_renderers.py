"""One document with every kind of block through each renderer: nothing is lost, and names stay text."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import lpconv.report.html
from lpconv.report.charts import Bar, HeatMap, Line, Loss, bar_chart, line_chart
from lpconv.report.document import (
    Cell,
    Check,
    Checks,
    Code,
    Document,
    Table,
    Tile,
    Verdict,
    section,
    sections_of,
)
from lpconv.report.html import html
from lpconv.report.terminal import show, terminal
from lpconv.results import Series

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'\u202e\x00\x1b[31m"


def document(name: str = "a.layer") -> Document:
    """Every block, with `name` in it wherever a file could put a text."""
    lines = line_chart(
        "Loss", name, [Line(series=Series(name="x", steps=(0, 1), values=(2.0, 1.0)), colour=0, label=name)]
    )
    bars = bar_chart("Bars", name, [Bar(name=name, text="1 [0, 2]", lengths=(1.0,), interval=(0.0, 2.0))], x_label="x")
    loss = Loss(layer=name, block="fp16", column="weight", underflow=0.5, overflow=0.0, title=name)
    heat = HeatMap(title="Lost", description=name, blocks=("fp16",), columns=("weight",), losses=(loss,))
    table = Table(
        columns=("Name", "Value", "<Why"), has_names=True, sortable=True, filter="word", most=2,
        rows=tuple((f"{name}.{i}", Cell(text=f"{i} B", sort=float(i)), name) for i in range(3)),
    )  # fmt: skip
    blocks = (
        f"prose {name}", table, {"fact": name}, (f"bullet {name}",), heat,
        Checks(checks=(Check(name=name, outcome="failed", text="found"),)), Code(lines=("import x", name)),
        Table(columns=("A",), rows=(("folded",),), folded="1 more"),
    )  # fmt: skip
    return Document(
        kind="test", title=name, subtitle=f"sub {name}", verdict=Verdict(outcome="failed", text=f"no: {name}"),
        summary=name, tiles=(Tile(label="tile", figure="45 %", detail=name),), warnings=(f"warned {name}",),
        sections=sections_of(section("", lines, bars), section("All", *blocks, outcome="not run")),
        facts={"Steps": name}, command=name, versions={"lpconv": "1"},
    )  # fmt: skip


def printed(shown: Document, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(terminal(shown))
    return out.getvalue()


class Page(HTMLParser):
    """The elements of a page, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "input", "wbr"}:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def test_a_terminal_shows_all_but_charts_in_its_width() -> None:
    text = printed(document())
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0] == "a.layer: no: a.layer"
    for words in ("sub a.layer", "45 %, a.layer", "Steps", "bullet a.layer", "failed", "warned", "a.layer.1", "1 more"):
        assert words in text
    for words in ("Loss", "folded", "a.layer.2"):
        assert words not in text
    assert "1 more " in text


def test_a_page_holds_every_block_with_unique_ids_and_a_text_for_each_chart() -> None:
    text = html(document())
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    plots = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(plots) == 3
    assert all(set((p["aria-labelledby"] or "").split()) <= set(ids) for p in plots)
    assert any(tag == "p" and (attrs.get("class") or "").split()[-1:] == ["failed"] for tag, attrs in page.tags)
    assert 'data-sort="2.0"' in text
    for words in ("45\u00a0%", "folded", "import", "warned", "bullet", "</details>"):
        assert words in text


@pytest.mark.parametrize("only", ["page", "terminal"])
def test_a_section_may_be_for_one_renderer(only: str) -> None:
    found = section("Here", "once", only=only)  # type: ignore[arg-type]  # one of the two
    shown = replace(document(), sections=sections_of(found))
    assert ("once" in printed(shown)) == (only == "terminal")
    assert ("once" in html(shown)) == (only == "page")


def test_hostile_names_stay_text() -> None:
    text = html(document(HOSTILE))
    tags = Page(text).tags
    assert [tag for tag, _ in tags].count("script") == 1
    assert "img" not in [tag for tag, _ in tags]
    assert not any(name.startswith("on") for _, attrs in tags for name in attrs)
    for bad in ("\x00", "\u202e", "\x1b"):
        assert bad not in text
        assert bad not in printed(document(HOSTILE))


def test_nothing_comes_from_outside() -> None:
    text = html(document())
    assert not re.search(r'https?:|//[a-z]|@import|url\(|\bsrc=|\bhref="[^#]', text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize(("module", "heavy"), [("html", "rich"), ("terminal", "jinja2")])
def test_rendering_loads_no_heavy_library(module: str, heavy: str) -> None:
    code = (
        f"import sys, lpconv.report.{module};"
        f"print([m for m in ('torch', 'transformers', 'matplotlib', 'numpy', '{heavy}') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_pipe_gets_plain_whole_lines_in_the_width_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    pipe = io.StringIO()
    show(document("x" * 100), file=pipe)
    assert "x" * 100 in pipe.getvalue()
    assert not any(line.endswith(" ") for line in pipe.getvalue().splitlines())
    monkeypatch.setenv("COLUMNS", "60")
    narrow = io.StringIO()
    show(document(), file=narrow)
    assert max(map(len, narrow.getvalue().splitlines())) <= 60


def test_an_ascii_pipe_gets_ascii() -> None:
    raw = io.BytesIO()
    pipe = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    show(document("a → b"), file=pipe)
    assert b"a -> b" in raw.getvalue()


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2.2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


STYLE = (Path(lpconv.report.html.__file__).parent / "templates/style.css").read_text(encoding="utf-8")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out_in_both_themes(theme: str) -> None:
    """WCAG 2.2: contrast of at least 4.5 for text and 3 for what a chart's reader must tell apart."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, flags=re.DOTALL)
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
