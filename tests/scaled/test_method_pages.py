"""The programs on the pages of the three methods run as they stand."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "methods"


@pytest.mark.parametrize("page", ["unit", "scalify", "adaptive"])
def test_the_programs_of_a_page(page: str) -> None:
    programs = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert programs
    for program in programs:
        exec(compile(program, f"{page}.md", "exec"), {})
