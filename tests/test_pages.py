"""Generated pages are what their generators print."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkpoints import cli_environment

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("page", "module"),
    [("api", "tests.api_page"), ("options", "tests.cli.options_page"), ("coverage", "tests.scaled.coverage_page")],
)
def test_a_page_is_current(page: str, module: str) -> None:
    """In a process of its own: other tests add toys to tables, packages and commands."""
    command = [sys.executable, "-m", module]
    printed = subprocess.run(command, env=cli_environment(), capture_output=True, encoding="utf-8", check=True).stdout
    file = ROOT / "docs" / "reference" / f"{page}.md"
    assert file.read_text(encoding="utf-8") == printed, f"run `python -m {module} > {file.relative_to(ROOT)}`"
