"""The page on options says what the commands do."""

import subprocess
import sys
from pathlib import Path


def test_the_page_on_options_is_current() -> None:
    """In a process of its own: help lists what there was when it was first read, toys of other tests too."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
    script = Path(__file__).with_name("options_page.py")
    found = subprocess.run([sys.executable, script], capture_output=True, encoding="utf-8", check=True).stdout
    assert page.read_text(encoding="utf-8") == found, "run the command on top of docs/reference/options.md"
