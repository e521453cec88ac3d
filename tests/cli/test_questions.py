"""The first screen: what people come with, and commands that exist."""

import re
from pathlib import Path

import typer
from typer.testing import CliRunner

from lpconv.cli.main import QUESTIONS, app

README = Path(__file__).parent.parent.parent / "README.md"


def test_lpconv_alone_answers_questions() -> None:
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    for question, command in QUESTIONS.items():
        assert re.search(rf"{re.escape(question)}\s+{re.escape(command)}\n", done.stdout)


def test_the_readme_has_the_same_table() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `(lpconv [^`]+)` \|$", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert dict(rows) == QUESTIONS


def test_every_command_exists() -> None:
    commands = typer.main.get_command(app).commands
    assert {command.split()[1] for command in QUESTIONS.values()} <= set(commands)
