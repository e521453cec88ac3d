"""The terminal shows what a user asks at once: what was done, what it saved, what it cost, how it was checked."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from report_examples import bert_result, calibrated_result, llama_result, plan_of
from rich.console import Console, RenderableType

from lpconv.report.convert.terminal import (
    render_compare,
    render_convert,
    render_inspect,
    render_plan,
)
from lpconv.report.terminal import Name, show, table_of
from lpconv.results import (
    ByteCounts,
    ConvertResult,
    DtypeRecord,
    FileRecord,
    InspectResult,
    StoredTensor,
    VerifyResult,
)


def text_of(renderable: RenderableType, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


BENCH = ("Configuration", "Step", "Tokens/s", "Speed-up", "Peak", "Saved", "Output err.", "Grad. err.", "Emulated")
FIGURES = ("fp8 static", "99.3 ms", "1,048,576", "0.27 [0.13, 0.55]", "846 kB", "131 kB", "3.8 %", "5.99 %", "yes")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_figure_of_a_table_is_cut(width: int) -> None:
    text = text_of(table_of(*BENCH, rows=[FIGURES]), width=width)
    assert all(figure in text for figure in FIGURES)
    assert all(word in text for heading in BENCH for word in heading.split())
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert sum(line.startswith("fp8 static") for line in text.splitlines()) == (
        1 if width > 80 else 2 if width > 50 else 4
    )


def test_names_give_way_before_other_words_wrap() -> None:
    row = (Name(name="backbone.layers.0.mixer.dt_proj.weight"), "e4m3fn codes with one scale", "128 x 4")
    text = text_of(table_of("Tensor", "<Numbers", "Shape", rows=[row]), width=70)
    assert "e4m3fn codes with one scale" in text
    assert "b.layers.0.mixer.dt_proj.weight" in text
    assert "b.l.0.m.dt_proj.weight" in text_of(table_of("Tensor", "<Numbers", "Shape", rows=[row]), width=50)


def words_of(renderable: RenderableType) -> str:
    """The text without line breaks, so that a sentence is found wherever it wraps."""
    return " ".join(text_of(renderable).split())


def test_convert_answers_the_first_questions() -> None:
    text = words_of(render_convert(bert_result()))
    assert "sentence-transformers/all-MiniLM-L6-v2 → out/minilm-unit-fp16" in text
    assert "unit scaling: 40 of 104 tensors became fp16 codes with one scale each, 64 kept their bits" in text
    assert "90.9 MB → 45.5 MB (2.00x smaller, 50.1 % of the source)" in text
    assert "420 ms, 0.32 GB/s read and written" in text
    assert "Peak memory 388 MB" in text
    assert "1-D: norms and biases keep their format" in text
    assert "Verification: passed (level logits)" in text
    assert "14 files match SHA256SUMS" in text
    assert "gate sqnr>=25" in text


def test_convert_says_on_what_inputs_were_calibrated() -> None:
    said = " ".join(text_of(render_convert(calibrated_result())).split())
    assert "Inputs have scales in the file, calibrated on 4,096 tokens of plays.txt." in said
    assert "calibrated" not in text_of(render_convert(bert_result()))


def test_worst_tensors_come_with_the_cause() -> None:
    text = words_of(render_convert(llama_result()))
    worst = min((t for t in llama_result().tensors if t.sqnr_db), key=lambda t: t.sqnr_db or 0)
    assert worst.name in text
    assert "Besides rounding" in text
    assert "% to zero" in text
    saturated = [replace(t, num_saturated=3, sqnr_db=9.0) if t is worst else t for t in [worst]]
    assert "3 saturated" in words_of(render_convert(bert_result(tensors=tuple(saturated))))


def test_rounding_alone_needs_no_column() -> None:
    text = words_of(render_convert(bert_result()))
    assert "Lowest signal-to-noise (from rounding alone)" in text
    assert "Besides rounding" not in text


def test_warnings_are_shown() -> None:
    assert "- scale of a.weight is 0" in words_of(render_convert(bert_result(warnings=("scale of a.weight is 0",))))


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("result", [bert_result(), llama_result()], ids=["bert", "llama"])
def test_lines_fit_the_width(result: ConvertResult, width: int) -> None:
    rendered = [render_convert(result), render_plan(plan_of(result)), render_compare([result] * 7)]
    for renderable in rendered:
        assert max(len(line) for line in text_of(renderable, width).splitlines()) <= width


def test_layer_numbers_survive_a_narrow_terminal() -> None:
    text = text_of(render_convert(llama_result()), width=80)
    assert "m.l.8.self_attn.k_proj.weight" in text


def test_a_wide_terminal_shows_whole_names() -> None:
    rows = [line.split() for line in text_of(render_convert(llama_result()), width=140).splitlines()]
    assert ["model.layers.8.self_attn.k_proj.weight", "e4m3fn"] in [row[:2] for row in rows]


def test_a_plan_says_that_nothing_happened_and_what_it_needs() -> None:
    text = words_of(render_plan(plan_of(bert_result("e4m3fn"))))
    assert "Nothing has been written." in text
    assert "34.7 MB needed, 512 GB free" in text
    assert "260 MB with 2 workers" in text
    assert "3 files: config.json, tokenizer.json, vocab.txt" in text


def test_inspect_shows_headers_ties_and_problems() -> None:
    found = InspectResult(
        path="out/x",
        method="unit",
        format="fp16",
        dtypes=(DtypeRecord(dtype="F16", num_tensors=38, num_elements=22_000_000, size_bytes=44_000_000),),
        shards=tuple(FileRecord(name=f"model-{i}.safetensors", size_bytes=1000) for i in range(20)),
        ties={"lm_head.weight": "model.embed_tokens.weight"},
        tensors=(StoredTensor(name="a.weight", dtype="F16", shape=(1, 2, 3), file="f", size_bytes=12, scale=0.25),),
        problems=("index names a missing file",),
    )
    text = words_of(render_inspect(found, every=True))
    for words in ("lpconv, unit scaling, fp16", "22,000,000", "and 12 files, 12.0 kB", "- index names a missing file",
                  "lm_head.weight → model.embed_tokens.weight", "1 x 2 x 3", "2^-2"):  # fmt: skip
        assert words in text
    assert "RMS" not in text, "a column without a value is left out"


def test_an_ordinary_checkpoint_without_problems() -> None:
    text = text_of(render_inspect(InspectResult(path="x", checked=("headers", "index"), not_checked=("values",))))
    assert [line.rstrip() for line in text.splitlines()[:3]] == [
        "x: no problem found",
        "Checked      headers, index",
        "Not checked  values",
    ]
    assert "an ordinary checkpoint" in text


def test_inspect_fits_one_screen_however_much_there_is() -> None:
    notes = tuple(f"`t{i}` is odd" for i in range(1000))
    tensors = tuple(StoredTensor(name=f"t{i}", dtype="F32", shape=(1,), file="f", size_bytes=4) for i in range(1000))
    ties = {f"a{i}": f"b{i}" for i in range(1000)}
    found = InspectResult(path="x", problems=notes, warnings=notes, tensors=tensors, ties=ties)
    text = text_of(render_inspect(found))
    assert text.splitlines()[0] == "x: 1,000 problems, 1,000 warnings"
    assert len(text.splitlines()) < 50
    assert "and 995 more (--all)" in text
    assert "1,000 tensors; --all lists them" in text
    assert len(text_of(render_inspect(found, every=True)).splitlines()) > 4000


def test_inspect_says_first_that_weights_were_not_judged() -> None:
    text = text_of(render_inspect(InspectResult(path="x", not_judged="nobody reads it", warnings=("odd",))))
    assert text.splitlines()[0] == "x: not judged, nobody reads it"


def test_compare_puts_every_run_side_by_side() -> None:
    text = text_of(render_compare([bert_result(), bert_result("e4m3fn")]), width=80)
    line = next(line for line in text.splitlines() if line.startswith("smallest SQNR"))
    assert line.split()[-2:] == ["72.2", "30.1"]
    assert "minilm-unit-fp16" in text
    assert "minilm-unit-e4m3fn" in text


def test_runs_with_one_name_are_numbered() -> None:
    text = text_of(render_compare([bert_result(output="a/out"), bert_result(output="b/out")]))
    assert "out (1)" in text
    assert "out (2)" in text


def test_nothing_measured_and_no_tensors() -> None:
    nothing = bert_result(
        tensors=(), files=(), bytes=ByteCounts(read=0, written=0), seconds=0.0, architecture=None, command=None,
        verify=VerifyResult(level="none", passed=True),
    )  # fmt: skip
    assert "0 of 0 tensors" in words_of(render_convert(nothing))
    assert "out/minilm" in text_of(render_plan(plan_of(nothing)))
    unread = tuple(replace(t, sqnr_db=None, rms=None, max_rel_error=None) for t in bert_result().tensors)
    assert "Lowest" not in text_of(render_convert(bert_result(tensors=unread)))


def test_names_cannot_drive_the_terminal() -> None:
    bad = replace(bert_result().tensors[1], name="a\x1b]0;owned\x07\n[bold]b\u202e", sqnr_db=1.0)
    text = text_of(render_convert(bert_result(tensors=(bad,))), width=140)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"a\x1b]0;owned\x07\n[bold]b\u202e" in text


def test_a_pipe_gets_plain_text_with_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    pipe = io.StringIO()
    show(render_convert(llama_result()), file=pipe)
    text = pipe.getvalue()
    assert "\x1b" not in text
    assert "model.layers.8.self_attn.k_proj.weight" in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_columns_sets_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    pipe = io.StringIO()
    show(render_convert(llama_result()), file=pipe)
    assert max(len(line) for line in pipe.getvalue().splitlines()) <= 72


def test_an_ascii_pipe_gets_ascii() -> None:
    raw = io.BytesIO()
    pipe = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    show(render_convert(llama_result()), file=pipe)
    assert b"llama-3-8b -> out/llama-unit-e4m3fn" in raw.getvalue()


def test_rendering_loads_no_heavy_library() -> None:
    code = (
        "import sys, lpconv.report.convert.terminal, lpconv.report.convert.card, lpconv.results;"
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'numpy', 'jinja2') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
