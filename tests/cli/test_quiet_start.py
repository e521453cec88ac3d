"""What other libraries say while they are imported is not ours to print."""

import logging

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
