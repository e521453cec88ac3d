"""The page on the Python API says what the packages give."""

import subprocess
import sys
from pathlib import Path


def test_the_page_on_the_api_is_current() -> None:
    """In a process of its own: other tests add toys to tables and packages."""
    page = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
    script = Path(__file__).with_name("api_page.py")
    done = subprocess.run([sys.executable, script], capture_output=True, encoding="utf-8", check=True)
    assert page.read_text(encoding="utf-8") == done.stdout, "run the command on top of docs/reference/api.md"
