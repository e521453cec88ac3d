"""What other libraries say is not ours to print, and what we print is not theirs to mix with."""

import logging
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app


def test_talkative_libraries_are_heard_only_when_asked_for() -> None:
    heard = logging.getLogger("torchao")
    before = heard.level
    try:
        CliRunner().invoke(app, ["-v", "doctor", "--aliases"])
        assert heard.level == before
        CliRunner().invoke(app, ["doctor", "--aliases"])
        assert not heard.isEnabledFor(logging.WARNING)
    finally:
        heard.setLevel(before)


def test_what_libraries_write_to_stdout_goes_to_stderr() -> None:
    code = (
        "import os; from lpconv.cli import main; main.app = lambda: (os.write(1, b'theirs'), print('ours')); main.run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("ours\n", "theirs")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_failure(closed: str) -> None:
    done = subprocess.run(f"{sys.executable} -m lpconv doctor --aliases {closed}", shell=True, check=False)
    assert done.returncode == 0
