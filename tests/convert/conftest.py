"""A sound checkpoint to break, and a way to convert it."""

from pathlib import Path
from typing import Any

import pytest

from lpconv.convert.run import convert
from lpconv.plan.options import ConvertOptions
from lpconv.results import ConvertResult
from tests.helpers.checkpoints import Run, write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sound checkpoint to break."""
    return write_checkpoint(tmp_path / "source")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def run(source: Path, output: Path) -> Run:
    """Convert the source into the output, with options by name."""

    def run(**options: Any) -> ConvertResult:
        return convert(str(source), output, ConvertOptions(**{"verify": "weights", "workers": 1, **options}))

    return run
