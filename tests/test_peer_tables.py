"""The tables of calibrated rounding in benchmarks/quality/README.md are those of the recorded rows."""

from benchmarks.common import ROOT, recorded
from benchmarks.quality.peers import OURS, THEIRS, table

PAGE = ROOT / "benchmarks" / "quality" / "README.md"


def test_the_page_has_the_tables_of_the_recorded_rows() -> None:
    assert table(recorded("peers")) in PAGE.read_text(encoding="utf-8")


def test_rows_of_a_model_and_layout_take_as_many_bytes() -> None:
    """GPTQ's own files have zero points and the group of each column besides: up to 7 % more."""
    rows = [r for r in recorded("peers")["rows"] if "bytes" in r]
    for row in rows:
        ours = next(r for r in rows if (r["model"], r["layout"], r["rounding"]) == (*_place(row), "nearest"))
        most = 1.07 if row["rounding"].startswith("GPTQModel") else 1.0
        assert ours["bytes"] <= row["bytes"] <= most * ours["bytes"], row
    assert {r["rounding"] for r in rows} <= {*OURS, *THEIRS}


def _place(row: dict[str, object]) -> tuple[object, object]:
    return row["model"], row["layout"]
