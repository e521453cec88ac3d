"""What a person sees of a run's phases: bars on a terminal, lines elsewhere."""

import io
import re
import sys
import time
from collections.abc import Callable

import pytest

from lpconv.cli.progress import QUIET, VERBOSE, progress_for


class Terminal(io.StringIO):
    """A stderr that a person watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[io.StringIO, bool], str]:
    def run(stderr: io.StringIO, quiet: bool) -> str:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "stderr", stderr)
        QUIET.set(quiet)
        with progress_for() as progress:
            progress.start("converting", 4_000_000)
            progress.advance(1_000_000)
            progress.start("run (fp32), seed 0", 8, unit="steps", done=2)
            progress.advance(1, "loss 1.2345")
            progress.message("saving")
            progress.start("hashing", 2, unit="files")
            progress.advance(2)
        return stderr.getvalue()

    return run


def test_a_terminal_gets_a_bar_in_bytes_and_then_one_in_steps(shown: Callable[[io.StringIO, bool], str]) -> None:
    text = shown(Terminal(), False)
    for expected in ("starting", "converting", "1.0/4.0 MB", "3/8", "loss 1.2345, ", "memory", "saving", "finishing"):
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
        "hashing, 2 files",
    ]


def test_a_pipe_hears_of_a_long_phase_with_its_total_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lpconv.cli.progress._LINE_EVERY_S", 0.05)
    QUIET.set(False)
    with progress_for() as progress:
        time.sleep(0.12)
        progress.start("running", 9, unit="windows", done=1)
        time.sleep(0.04)
        progress.advance(2)
        time.sleep(0.16)
        progress.advance(6)
        time.sleep(0.12)
    lines = capsys.readouterr().err.splitlines()
    assert re.match(r"starting: \d+ ms", lines[0])
    left = [int(match[1]) for line in lines if (match := re.match(r"running: 3 of 9 windows, .* (\d+) ms", line))]
    assert len(left) > 1
    assert left == sorted(left, reverse=True), "a window that takes longer adds nothing"
    assert lines[-1].startswith("finishing: running")
