"""Tables on a terminal: no figure is cut, and names give way first."""

import io
from dataclasses import replace

import pytest

from lpconv.report.convert import compare_conversions, convert_document, plan_document
from lpconv.report.document import Code, Document, Section, Table
from lpconv.report.terminal import show
from lpconv.results import ConvertResult
from tests.helpers.report_examples import bert_result, llama_result, plan_of


def text_of(shown: Document | Table, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    show(shown, file=out)
    return out.getvalue()


BENCH = ("Configuration", "Step", "Tokens/s", "Speed-up", "Peak", "Saved", "Output err.", "Grad. err.", "Emulated")
FIGURES = ("fp8 static", "99.3 ms", "1,048,576", "0.27 [0.13, 0.55]", "846 kB", "131 kB", "3.8 %", "5.99 %", "yes")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_figure_of_a_table_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(Table(columns=BENCH, rows=(FIGURES,)), width, monkeypatch)
    assert all(figure in text for figure in FIGURES)
    assert all(word in text for heading in BENCH for word in heading.split())
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert sum(line.startswith("fp8 static") for line in text.splitlines()) == (
        1 if width > 80 else 2 if width > 50 else 4
    )


SENTENCE = " ".join(["bf16"] * 13 + ["FP8_DYNAMIC"])


@pytest.mark.parametrize(("width", "lines"), [(40, 4), (80, 2), (140, 1)])
def test_sentences_are_never_squeezed_into_narrow_columns(
    width: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ("amp-bf16", "bf16", "none", SENTENCE)
    text = text_of(Table(columns=("Recipe", "Precision", "Method", "<Use"), rows=(row,)), width, monkeypatch)
    assert max(map(len, text.splitlines())) <= width
    shown = [line.strip() for line in text.splitlines()[2:] if "─" not in line]
    assert " ".join(shown).endswith(SENTENCE)
    assert len(shown) == lines


def test_code_is_never_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Document(kind="test", title="x", sections=(Section(blocks=("first", Code(lines=(SENTENCE,)))),))
    assert f"  {SENTENCE}\n" in text_of(shown, 40, monkeypatch)


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("result", [bert_result(), llama_result()], ids=["bert", "llama"])
def test_lines_fit_the_width(result: ConvertResult, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"minilm-unit-fp16-{i}" for i in range(7)]
    for shown in (convert_document(result), plan_document(plan_of(result)), compare_conversions([result] * 7, names)):
        assert max(map(len, text_of(shown, width, monkeypatch).splitlines())) <= width


def test_names_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = replace(bert_result().tensors[1], name="a\x1b]0;owned\x07\n[bold]b\u202e", sqnr_db=1.0)
    text = text_of(convert_document(bert_result(tensors=(bad,))), 140, monkeypatch)
    assert "\x1b" not in text
    assert r"a\x1b]0;owned\x07\n[bold]b\u202e" in text


def test_many_runs_are_cut_into_several_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = compare_conversions([bert_result()] * 7, [f"run-{i}" for i in range(7)])
    text = text_of(compared, 80, monkeypatch)
    assert all(f"run-{i}" in text for i in range(7))
    assert sum(line.startswith("smallest SQNR") for line in text.splitlines()) > 1
