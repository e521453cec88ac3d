"""Charts from values, and where they lie on the page."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from lpconv.errors import InputError
from lpconv.report.bench import bench_document
from lpconv.report.charts import Bar, HeatMap, Line, Loss, Tick, bar_chart, line_chart
from lpconv.report.convert import convert_document
from lpconv.report.drawing import Drawing, HeatDrawing
from lpconv.report.finetune import finetune_document
from lpconv.report.html import html
from lpconv.report.verify import verify_document
from lpconv.results import Series, from_json, json_text, to_json
from tests.helpers import page_examples
from tests.helpers.report_examples import bert_result, calibrated_result


def test_a_band_of_error_lies_behind_its_line_and_within_the_axis() -> None:
    series = Series(name="x", steps=(0, 1), values=(1.0, 1.25))
    chart = line_chart("X", "", [Line(series=series, colour=0, error=0.5)])
    assert chart is not None
    band, line = chart.marks
    assert (band.kind, band.shape, line.kind) == ("line series-0 band", "area", "line series-0")
    assert band.points == ((0, 1.5), (1, 1.75), (1, 0.75), (0, 0.5))
    assert chart.y.low < 0.5 < 1.75 < chart.y.high


def test_a_line_breaks_where_a_value_is_not_finite() -> None:
    series = Series(name="x", steps=(1, 2, 3, 4), values=(1.0, math.nan, 2.0, 3.0))
    chart = line_chart("X", "", [Line(series=series, colour=0)])
    assert chart is not None
    path = Drawing(chart).path(chart.marks[0])
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert len({tick.label for tick in chart.y.ticks}) == len(chart.y.ticks)
    assert line_chart("X", "", [Line(series=Series(name="x", steps=(), values=()), colour=0)]) is None


@pytest.mark.parametrize("interval", [(-0.00006, 0.000287), (-0.000287, 0.00006)])
def test_a_label_at_an_end_of_the_axis_is_left_out_rather_than_cut(interval: tuple[float, float]) -> None:
    chart = bar_chart("X", "", [Bar(name="a", text="", lengths=(0.001,), interval=interval)], x_label="gap")
    assert chart is not None
    drawing = Drawing(chart)
    halves = [(x, 7 * len(label) / 2) for x, label in drawing.axis_labels()]
    assert len(halves) >= 3
    assert all(half <= x <= drawing.width - half for x, half in halves)


def test_cells_of_a_heat_map_do_not_overlap_and_stay_inside() -> None:
    losses = tuple(
        Loss(layer=layer, block=block, column=column, underflow=0.1, overflow=0.0, title="")
        for layer in ("a" * 80, "b") for block in ("fp16", "e5m2") for column in ("weight", "input")
    )  # fmt: skip
    heat = HeatMap(title="", description="", blocks=("fp16", "e5m2"), columns=("weight", "input"), losses=losses)
    drawing = HeatDrawing(heat)
    places = {(drawing.x(loss.block, loss.column), drawing.y(loss.layer)) for loss in losses}
    assert len(places) == len(losses)
    assert max(x for x, _ in places) + drawing.cell_width <= drawing.width
    assert drawing.rows()[0].label.startswith("…")


def _with_number(document: Any, key: str, value: object, *, is_named: bool = False) -> Any:
    """The document with `value` for every number below `key`."""
    if isinstance(document, dict):
        return {k: _with_number(v, key, value, is_named=is_named or k == key) for k, v in document.items()}
    if isinstance(document, list):
        return [_with_number(v, key, value, is_named=is_named) for v in document]
    return value if is_named and type(document) in (int, float) else document


@pytest.mark.parametrize("value", [1e30, 1e308, -1e308, "nan", 10**400])
@pytest.mark.parametrize("kind", ["bench", "finetune", "verify", "convert", "calibrated"])
def test_a_page_of_odd_numbers_ends(kind: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bert_result()
    record, document = {
        "bench": (page_examples.bench(), bench_document),
        "finetune": (page_examples.finetune(), finetune_document),
        "verify": (page_examples.verification(), verify_document),
        "convert": (replace(first, tensors=first.tensors[:6]), convert_document),
        "calibrated": (calibrated_result(), convert_document),
    }[kind]

    def tick(**fields: Any) -> Tick:
        assert next(count) < 10_000
        return Tick(**fields)

    monkeypatch.setattr("lpconv.report.charts.Tick", tick)
    table = json.loads(json_text(record))
    keys = {"sqnr_db", "scale", "absmax", "rms", "seconds", "step_time_s", "standard_error", "top1_agreement",
            "values", "steps", "high", "size_bytes", "max_rel_error"}  # fmt: skip
    for key in sorted(keys):
        count = itertools.count()
        try:
            odd = from_json(type(record), _with_number(table, key, value))
        except InputError:  # a number that its field cannot have
            continue
        assert html(document(odd)).rstrip().endswith("</html>"), key
    assert from_json(type(record), to_json(record)) == record
