"""Every kind of page in a headless Chromium: wide, on a phone, light and dark, nothing is cut, hidden or raw.

Skipped if no Chromium is installed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import Browser, find_browser, problems
from tests.helpers.page_examples import example_pages

PAGES = example_pages()
VIEWS = {"wide": (1280, False), "wide, dark": (1280, True), "phone": (390, False)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_all_that_it_says(name: str, browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[name], encoding="utf-8")
    browser.open(page)
    for view, (width, dark) in VIEWS.items():
        browser.look(width=width, dark=dark)
        assert problems(browser) == [], view


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<div style="width: 1400px">x</div>', "page"),
        ('<div class="scroll"><div style="width: 1400px">x</div></div>', "box"),
        ("<p>Residual: None</p>", ": None"),
        ("<p>Rules: []</p>", ": []"),
        ("<p>2^-4</p>", ": 2^"),
        ("<p>loss nan</p>", ": nan"),
        ('<b title="0.25">cell</b>', ": 0.25"),
        ('<svg viewBox="0 0 9 9"><path d="M0 0"><title>rms 0.25</title></path></svg>', ": 0.25"),
        ('<svg viewBox="0 0 90 90" width="90"><text x="80" y="9">cut off</text></svg>', "label"),
        ('<p style="color: #eee; background: #fff">pale</p>', ": pale"),
    ],
)
def test_what_is_wrong_is_seen(body: str, problem: str, browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><style>body {{ background: white }}</style>{body}", encoding="utf-8")
    browser.open(page)
    browser.look(width=1280)
    assert any(problem in found for found in problems(browser))
