"""A bench as a document, from records."""

import re
from typing import Any

import pytest

from lpconv.bench.options import BenchOptions
from lpconv.bench.roofline import roofline_verdict
from lpconv.bench.rows import BenchRun
from lpconv.progress import Silent
from lpconv.report.bench import bench_document, compare_benches
from lpconv.report.document import Document, Table
from lpconv.results import BenchResult, BenchRow, GateRecord, from_json, to_json
from tests.helpers.bench_records import CPU_PEAKS, GEMMS, result, row
from tests.helpers.report_examples import blocks_of, charts_of, section_of, verdict_of

ROWS = (row("plain"), row("static"), row("te", status="skipped", reason="not installed", ratio=(1, 1, 1)))


def judged(*rows: BenchRow, **fields: Any) -> BenchResult:
    found = roofline_verdict(rows, GEMMS, CPU_PEAKS)
    assert found is not None
    return from_json(BenchResult, to_json(result(*rows)) | {"verdicts": [to_json(found)]} | fields)


def table(document: Document, title: str) -> Table:
    (found,) = (b for b in section_of(document, title).blocks if isinstance(b, Table))
    return found


def test_rows_show_only_columns_that_differ_or_are_always_asked_for() -> None:
    found = table(bench_document(judged(*ROWS)), "Every row")
    assert "Mode" not in found.columns
    cells = dict(zip(found.columns, found.rows[1], strict=True))
    assert (cells["Configuration"], cells["Speed-up"], cells["Peak"]) == ("fp8 static", "1.30 [1.20, 1.40]", "1.00 kB")
    both = bench_document(result(row("plain"), row("static", mode="infer")))
    assert "Mode" in table(both, "Every row").columns


def test_memory_linears_and_sentences_have_their_sections() -> None:
    document = bench_document(judged(*ROWS))
    memory = table(document, "Memory of tensors at the peak of a step")
    assert memory.rows[0][2].startswith("weights 10 %, gradients 5 %")  # type: ignore[union-attr]  # a text
    (linears,) = (s for s in document.sections if "shape" in s.title)
    assert "14336" in str(linears)
    assert any("emulates fp8" in line for sentences in blocks_of(document, tuple) for line in sentences)


@pytest.mark.parametrize(
    ("ratio", "outcome", "word"),
    [
        ((0.36, 0.3, 0.4), "not run", "slower"),
        ((1.3, 1.2, 1.4), "passed", "fastest"),
        ((1.37, 0.73, 2.26), "not run", "not measurably faster"),
    ],
)
def test_the_verdict_says_whether_anything_was_faster(
    ratio: tuple[float, float, float], outcome: str, word: str
) -> None:
    document = bench_document(result(row("plain"), row("static", ratio=ratio), row("row", ratio=(0.2, 0.1, 0.3))))
    assert verdict_of(document).outcome == outcome
    assert re.match(rf"fp8 static .*{word}.*: {ratio[0]:.2f} \[", verdict_of(document).text)
    assert word.capitalize() in document.tiles[0].label
    assert [t.detail for t in document.tiles if "6 %" in t.figure and t.detail.endswith("has 6 %")]


def test_emulation_is_the_first_word_and_no_success() -> None:
    verdict = verdict_of(bench_document(result(row("plain"), row("static", emulated=True))))
    assert re.match(r"fp8 \w+ emulated .*GPU", verdict.text)
    assert verdict.outcome == "not run"


@pytest.mark.parametrize(("loads", "busy"), [((0.1, 2.1), False), ((1.1, 2.1), True), ((0.1, 3.9), True)])
def test_a_busy_machine_is_noted(loads: tuple[float, float], busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.bench.rows.load_average", lambda: loads[1])
    monkeypatch.setattr("lpconv.bench.rows.usable_cores", lambda: [0, 1])
    run = BenchRun(
        options=BenchOptions(), progress=Silent(), on_result=print, notes=(), monitor=None, peaks=CPU_PEAKS,
        idle=None, load=loads[0],
    )  # fmt: skip
    assert [re.findall(r"\d\.\d", note) for note in run.result(interrupted=True).notes] == [
        list(map(str, loads))
    ] * busy


def test_a_gate_that_failed_is_the_verdict() -> None:
    gates = [to_json(GateRecord(expression="speedup>=2", value=1.3, passed=False))]
    document = bench_document(judged(*ROWS, gates=gates))
    assert verdict_of(document).outcome == "failed"
    assert verdict_of(document).text.partition(" ")[2].startswith("speedup>=2 ")
    assert section_of(document, "1 of 1 gates failed").outcome == "failed"


def test_intervals_and_parts_of_memory_are_drawn() -> None:
    charts = charts_of(bench_document(judged(*ROWS)))
    speed, memory = charts["Speed-up over the baseline"], charts["Memory of tensors at the peak"]
    (whisker,) = (m for m in speed.marks if m.shape == "whisker" and m.title == "fp8 static")
    assert [x for x, _ in whisker.points] == [1.2, 1.4]
    assert ("fp8 static", "1.30 [1.20, 1.40]") in speed.rows
    assert [m.title for m in memory.legend] == ["weights", "gradients", "optimizer", "activations", "other"]
    assert max(box.x[1] for box in memory.boxes) == 1000
    assert not any("baseline" in title for title in charts_of(bench_document(result(row("plain")))))


def test_benches_are_compared_row_by_row() -> None:
    document = compare_benches([judged(*ROWS), judged(*ROWS)], ["monday", "tuesday"])
    assert re.match(r"fp8 static: monday .*: 1\.30 \[", verdict_of(document).text)
    rows = {first: rest for first, *rest in table(document, "Figures").rows}
    assert rows["fp8 static, train, 2 x 4096: speed-up"] == ["1.30 [1.20, 1.40]"] * 2
    assert [name for name, _ in charts_of(document)["Speed-up over the baseline"].rows] == [
        "fp8 static: monday", "fp8 te: monday", "fp8 static: tuesday", "fp8 te: tuesday",
    ]  # fmt: skip
