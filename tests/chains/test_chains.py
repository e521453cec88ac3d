"""No command fails after another one: each cell of docs/chains.md, done again."""

from pathlib import Path

import pytest
from chain_cells import COMMANDS, SOURCES, make, read_page, set_up, verdict

PAGE = read_page((Path(__file__).parents[2] / "docs" / "chains.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=SOURCES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A kind of checkpoint, and one of it."""
    return request.param, make(request.param, tmp_path_factory.mktemp("chains"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_after_another(
    checkpoint: tuple[str, Path], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = checkpoint
    set_up(monkeypatch, path.parent)
    assert verdict(command, path, tmp_path / "out") == PAGE[source, command]


def test_the_page_has_every_cell() -> None:
    assert PAGE.keys() == {(s, c) for s in SOURCES for c in COMMANDS}
