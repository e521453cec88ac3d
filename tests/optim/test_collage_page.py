"""The commands and the Python of docs/methods/collage.md run as they stand."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.optim.storage import VARIANTS

PAGE = Path(__file__).parents[2] / "docs/methods/collage.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_commands_and_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [line for block in blocks("") for line in block.splitlines() if line.startswith("lpconv ")]
    for command in commands:
        assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0, command
    code = blocks("python")
    assert commands
    assert code
    for block in code:
        exec(compile(block, str(PAGE), "exec"), {})


def test_the_table_of_variants_is_the_record() -> None:
    rows = re.findall(r"^\| `([\w-]+)`.* \| (\d+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name: int(size) for name, size in rows} == {n: v.bytes_per_parameter() for n, v in VARIANTS.items()}
