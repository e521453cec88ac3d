"""What a person sees of a run's phases: bars on a terminal, lines elsewhere."""

import io
import re
import sys
from collections.abc import Callable

import pytest

from lpconv.cli.progress import VERBOSE, progress_for


class Terminal(io.StringIO):
    """A stderr that a person watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[io.StringIO, bool], str]:
    def run(stderr: io.StringIO, quiet: bool) -> str:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_for(quiet=quiet) as progress:
            progress.start("converting", 4_000_000)
            progress.advance(1_000_000)
            progress.start("run (fp32), seed 0", 8, unit="steps", done=2)
            progress.advance(1, "loss 1.2345")
            progress.message("saving")
        return stderr.getvalue()

    return run


def test_a_terminal_gets_a_bar_in_bytes_and_then_one_in_steps(shown: Callable[[io.StringIO, bool], str]) -> None:
    text = shown(Terminal(), False)
    for expected in ("converting", "1.0/4.0 MB", "3/8", "loss 1.2345, ", "saving"):
        assert expected in text


def test_a_pipe_gets_a_line_for_long_phases_and_messages(shown: Callable[[io.StringIO, bool], str]) -> None:
    run, saving = shown(io.StringIO(), False).splitlines()
    assert re.match(r"run \(fp32\), seed 0: 8 steps, .* 2$", run)
    assert saving == "saving"
    assert shown(io.StringIO(), True) == ""


def test_verbose_gets_a_line_for_each_phase(shown: Callable[[io.StringIO, bool], str]) -> None:
    token = VERBOSE.set(True)
    try:
        lines = shown(io.StringIO(), False).splitlines()
    finally:
        VERBOSE.reset(token)
    assert [line.split(" s  ")[1].partition(":")[0] for line in lines] == [
        "converting, 4.00 MB",
        "run (fp32), seed 0",
        "saving",
    ]
