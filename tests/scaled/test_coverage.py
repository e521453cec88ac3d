"""The page on coverage says what the code does."""

from pathlib import Path

from tests.scaled import coverage_page


def test_the_coverage_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "coverage.md"
    assert page.read_text(encoding="utf-8") == coverage_page.page(), "run the command on its top"
