"""`benchmarks/speed/startup.py` times every command: to an error and to a result."""

from pathlib import Path

import pytest

from benchmarks.speed.startup import ERRORS, RESULTS, measure
from lpconv.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("commands", [ERRORS, RESULTS], ids=["errors", "results"])
def test_every_command_is_timed(commands: tuple[str, ...]) -> None:
    assert {c.split()[0] for c in commands if c} >= set(COMMANDS)


@pytest.mark.parametrize("command", ["convert me/model", "convert me/model, without network"])
def test_a_name_that_nobody_knows_is_refused_with_and_without_leave_to_ask(command: str, tmp_path: Path) -> None:
    found = measure(command, ROOT, tmp_path, label="after")
    assert found.exit_code == 3
    assert 0 < found.first_s <= found.end_s
    assert found.cpu_s > 0
