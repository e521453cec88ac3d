"""The page on options says what the commands do."""

from pathlib import Path

import options_page


def test_the_page_on_options_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == options_page.page(), "run the command on top of docs/options.md"
