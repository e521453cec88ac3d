"""The tables of docs/export.md are those of the recorded results."""

from benchmarks.serving.table import PAGE, page


def test_the_page_has_the_tables_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m benchmarks.serving.table --write`"
