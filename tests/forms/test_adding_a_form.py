"""docs/adding.md walked for a form, a method and a residual: each passes the contract suite, and converts the demo."""

from __future__ import annotations  # `Form` names tensors that it does not import

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import lpconv
from lpconv.cli.main import app
from lpconv.data import demo_checkpoint
from lpconv.formats.cast import cast
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms import FORMS, Component, Form, FormSettings, Headers
from lpconv.forms.blocks import Workspace, as_float32, block_error, block_stats, buffer_view
from lpconv.forms.facts import EncodedBlock, Measurement
from lpconv.forms.form import Side
from lpconv.forms.pair import RESIDUAL_DTYPES
from lpconv.mcf.split import RESIDUALS
from lpconv.methods import METHODS, Method
from tests.forms import test_contract as contract
from tests.helpers.checkpoints import bits_of

# Of the contract suite, what takes a form and nothing but pytest's own fixtures.
CONTRACT: tuple[Callable[[Form], None], ...] = (
    contract.test_what_is_stored_is_what_was_planned,
    contract.test_blocks_make_the_same_bytes_as_the_whole,
    contract.test_the_reference_sees_every_changed_number,
)


@dataclass(frozen=True, kw_only=True)
class Rounded(Form):
    """An ordinary bf16 tensor and nothing beside it."""

    kind: ClassVar[str] = "rounded"
    quantised_by: ClassVar[str | None] = None
    holds_one_format: ClassVar[bool] = True

    format: Format

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Rounded:
        return cls(name=name, shape=shape, format=format)

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        root = headers.root[name]
        return cls(name=name, shape=root.shape, format=FORMATS["bf16"]) if root.dtype == "BF16" else None

    @property
    def words(self) -> str:
        return f"rounded to {self.format.name}"

    @property
    def components(self) -> tuple[Component, ...]:
        return (Component(name=self.name, dtype="BF16", shape=self.shape),)

    def encode(self, x: Tensor, start: int, found: Measurement, work: Workspace) -> EncodedBlock:
        value, codes = as_float32(x, work), buffer_view(work.root, x.numel(), torch.bfloat16)
        stats = block_stats(x, work)
        codes.copy_(value)
        return EncodedBlock(data=(codes,), stats=stats, error=block_error(value, codes.float()))

    def decode(self, data: Sequence[Tensor], start: int, stop: int, side: Side) -> Tensor:
        return data[0].float()

    def is_right(self, value: Tensor, got: Tensor, start: int, side: Side) -> bool:
        return torch.equal(got, cast(value, "bf16"))


TOY = Method(name="toy", own="rounded", formats=("bf16",), default_format="bf16")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Method]:
    """The form and a method that writes it, as the page says: two files, two lines."""
    others = dict(FORMS)
    FORMS.clear()  # the order of `FORMS` says who is asked first, and `Kept` takes everything
    FORMS.update({"rounded": Rounded, **others})
    monkeypatch.setitem(METHODS, "toy", TOY)
    yield TOY
    FORMS.clear()
    FORMS.update(others)


def _try(form: Form, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract suite on a form."""
    for test in CONTRACT:
        test(form)
    contract.test_values_come_back_within_what_the_error_says(form, torch.bfloat16)
    contract.test_the_reader_knows_it_and_reads_it(form, folder, monkeypatch)


def test_a_form_and_a_method_are_held_to_the_contract(
    toy: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract.test_kinds_are_the_keys()
    form = next(f for f in contract._forms() if f.kind == "rounded")
    _try(form, tmp_path / "c", monkeypatch)


def test_every_command_takes_what_a_new_method_wrote(toy: Method, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    for command in (
        ["convert", "demo", "--method", "toy", "--verify", "logits", "-o", str(out)],
        ["inspect", str(out)],
        ["verify", str(out), "--level", "weights"],
        ["restore", str(out), "-o", str(back)],
        ["report", str(out)],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    source, stored = (load_file(folder / "model.safetensors") for folder in (demo_checkpoint(), out))
    matrices = {name: x for name, x in source.items() if x.dim() > 1}
    assert all(torch.equal(stored[name], x.bfloat16()) for name, x in matrices.items())
    opened = lpconv.load(out).state_dict()
    assert all(torch.equal(opened[name], x.bfloat16().float()) for name, x in matrices.items())


def test_a_residual_is_held_to_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record, its dtype where planning reads it, and its name in the method: three lines of three files."""
    monkeypatch.setitem(RESIDUALS, "toy", dataclasses.replace(RESIDUALS["exact16"], name="toy"))
    monkeypatch.setitem(RESIDUAL_DTYPES, "toy", "I16")
    collage = METHODS["collage"]
    monkeypatch.setitem(METHODS, "collage", dataclasses.replace(collage, residuals=(*collage.residuals, "toy")))

    contract.test_the_residuals_of_pairs_are_those_that_there_are()
    form = next(f for f in contract._forms() if "toy" in f.words)
    _try(form, tmp_path / "c", monkeypatch)
    assert bits_of(contract._store(form, contract._values(), 10).decoded()) == bits_of(contract._values())
