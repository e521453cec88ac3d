"""No command fails after another one: cells of docs/reference/chains.md, done again."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from tests.chains.chain_cells import COMMANDS, SOURCES, make, read_page, set_up, verdict

PAGE = read_page((Path(__file__).parents[2] / "docs" / "reference" / "chains.md").read_text(encoding="utf-8"))
# Checkpoints that are stored alike. One of each goes through every command; they take turns.
FORMS = {
    "kept": ("plain", "restored", "saved again", "fresh", "tuned plain"),
    "scaled": ("unit fp32", "unit fp16", "unit e4m3fn", "scalify e5m2", "tuned unit-fp8"),
    "tiles": ("unit mx e2m1", "unit 128x128", "unit group:32", "mixed"),
    "pair": ("collage bf16", "collage exact16", "collage int8", "collage fp16", "tuned collage-bf16"),
    "points": ("multipoint int4",),
    "entropy": ("unit 4 bits",),
    "compressed-tensors": (
        "compressed-tensors", "FP8_BLOCK", "MXFP4", "NVFP4", "NVFP4, inputs too", "W4A16", "mixed-precision",
    ),
    "transformers": ("fp8 of transformers", "mxfp8 of transformers"),
    "third-party": ("NVFP4 of others", "GGUF of others"),
}  # fmt: skip


def cells() -> Iterator[tuple[str, str]]:
    """One cell for every form and command, and all whose verdict is not the usual one of their command."""
    for number, command in enumerate(COMMANDS):
        usual = Counter(PAGE[source, command] for source in SOURCES).most_common(1)[0][0]
        for alike in FORMS.values():
            turn = alike[number % len(alike)]
            yield from ((s, command) for s in alike if s == turn or PAGE[s, command] != usual)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints lie that have been made."""
    return tmp_path_factory.mktemp("chains")


@pytest.mark.parametrize(("source", "command"), sorted(cells(), key=lambda cell: SOURCES.index(cell[0])))
def test_a_command_after_another(
    source: str, command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(source, folder)
    set_up(monkeypatch, folder)
    is_tokenized = source == "GGUF of others" and command in ("finetune collage-bf16", "advise")
    if is_tokenized and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 cannot read a GGUF file's tokenizer without merges")
    assert verdict(command, path, tmp_path / "out") == PAGE[source, command]


def test_the_page_has_every_cell_and_every_checkpoint_a_form() -> None:
    assert PAGE.keys() == {(s, c) for s in SOURCES for c in COMMANDS}
    assert sorted(s for alike in FORMS.values() for s in alike) == sorted(SOURCES)
    assert {s for s, _ in cells()} == set(SOURCES)
