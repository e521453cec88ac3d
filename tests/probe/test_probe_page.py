"""The examples on the page about probing run."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
