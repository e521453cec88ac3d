"""Writes docs/reference/chains.md: python -m tests.chains.chains_page > docs/reference/chains.md"""

import contextlib
import sys
import tempfile
from pathlib import Path

import pytest

from tests.chains.chain_cells import COMMANDS, SOURCES, make, set_up, verdict, write_page


def page() -> str:
    """The whole of docs/reference/chains.md."""
    verdicts = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        set_up(patch, Path(folder))
        for source in SOURCES:
            path = make(source, Path(folder))
            for i, command in enumerate(COMMANDS):
                print(f"{source}: {command}", file=sys.stderr)
                verdicts[source, command] = verdict(command, path, Path(folder) / f"{path.name}-{i}")
    return write_page(verdicts)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        text = page()
    print(text, end="")
