"""Generated pages are what their generators print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkpoints import cli_environment
from tests.models import models_page

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


def test_what_to_type_for_a_model_is_current() -> None:
    assert models_page.page() == models_page.PAGE.read_text(encoding="utf-8"), (
        "run `python -m tests.models.models_page`"
    )


def test_the_sample_report_needs_no_other_file() -> None:
    """It says itself by which command it was made."""
    page = (ROOT / "docs" / "sample-report.html").read_text(encoding="utf-8")
    assert "lpconv convert demo --scheme FP8_DYNAMIC -o demo-fp8" in page
    assert len(page) < 300_000
    assert not re.findall(r'(?:src|href)="[^#]', page)
