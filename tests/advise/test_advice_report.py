"""An advice on the terminal and as a page."""

import io
import math
import re
from dataclasses import replace

from advice_examples import a_row, an_advice, gap

from lpconv.report.advise.html import front_plot, html_advice
from lpconv.report.advise.terminal import render_advice
from lpconv.report.advise.words import recommendation, unknowns
from lpconv.report.terminal import show
from lpconv.results import AdviceResult, from_json, to_json


def printed(result: AdviceResult) -> str:
    file = io.StringIO()
    show(render_advice(result), file=file)
    return file.getvalue()


def test_the_record_survives_json() -> None:
    result = an_advice(a_row(), a_row("odd", gap=gap(math.inf, math.inf)))
    assert str(from_json(AdviceResult, to_json(result))) == str(result)


def test_the_recommendation_names_size_gap_and_budget() -> None:
    result = an_advice()
    words = recommendation(result, result.rows[0], "infer")
    assert words == (
        "Convert with unit e4m3fn, rows: 1.00 MB instead of 4.00 MB (4.00x smaller). On 8 windows the loss on the text "
        "changes by +0.0040 nats (+0.0020 to +0.0060), within the 0.01 nats allowed."
    )


def test_without_a_candidate_the_nearest_is_named() -> None:
    result = an_advice(a_row("a", gap=gap(0.02, 0.001), meets=False))
    assert "The nearest is a: +0.0200" in recommendation(result, None, "infer")
    assert "Nothing was measured" in recommendation(result, None, "train")


def test_what_is_not_known_is_said() -> None:
    result = an_advice(a_row(), a_row("later", status="unmeasured", gap=None), interrupted=True)
    said = " ".join(unknowns(result))
    for words in ("measured peaks here", "computed in fp32", "want of time: later", "stopped"):
        assert words in said


def test_terminal_and_page_hold_the_command_and_every_candidate_that_none_beats() -> None:
    pruned = a_row("unit e5m2", status="pruned", why="unit e4m3fn is no larger", gap=None)
    result = an_advice(a_row(), a_row("unit fp16", size_bytes=2_000_000, gap=gap(1e-6, 1e-6)), pruned)
    for text in (printed(result), html_advice(result)):
        for words in ("unit e4m3fn, rows", "unit fp16", "lpconv x", "a.weight"):
            assert words in text.replace("<wbr>", "")
    assert "unit e5m2" in html_advice(result)
    assert "unit e5m2" not in printed(result)
    assert "1 more cannot be better than these" in printed(result)


def test_the_front_marks_what_is_recommended_and_leaves_out_what_was_not_measured() -> None:
    result = an_advice(a_row(), a_row("b", size_bytes=2_000_000), a_row("c", status="unmeasured", gap=None))
    plot = front_plot(result, "infer")
    assert plot is not None
    assert {m.title for m in plot.marks} == {"budget", "the model itself", "unit e4m3fn, rows", "b"}
    assert sum("series-1" in m.kind for m in plot.marks) == 2  # its bar and its mark
    assert front_plot(replace(result, rows=result.rows[2:]), "infer") is None


def test_in_the_front_gaps_below_zero_lie_below_it() -> None:
    result = an_advice(a_row(gap=gap(-0.002, 0.001)), a_row("b", size_bytes=2_000_000, gap=gap(0.2, 0.1)))
    plot = front_plot(result, "infer")
    assert plot is not None
    heights = {t.label: t.position for t in plot.y_ticks}
    assert list(heights) == ["-0.001", "0", "0.001", "0.01", "0.1"]
    assert sorted(heights.values(), reverse=True) == list(heights.values())
    top, bottom = (float(y) for y in re.findall(r"[ V]([\d.]+)", plot.marks[2].path))
    assert heights["0"] < top
    assert heights["-0.001"] == top  # the upper end of -0.002 ± 0.001
    assert top < bottom < plot.bottom
