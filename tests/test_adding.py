"""docs/adding.md walked: what it says is all that a new entry needs.

Forms, methods and residuals are in tests/forms/test_adding_a_form.py, options in tests/test_options.py.
"""

import copy
import dataclasses
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from annotated_types import Ge
from torch import Tensor
from typer.testing import CliRunner

from lpconv.bench.options import BENCH_FORMATS, BENCH_METHODS
from lpconv.cli.command import Json
from lpconv.cli.main import COMMANDS, app
from lpconv.doctor import format_support
from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.cast import cast
from lpconv.formats.codes import decode, encode
from lpconv.formats.histogram import exponent_histogram_reference
from lpconv.formats.spec import FORMATS, Format
from lpconv.kernels.linear import FP8_RECIPES, fp8_recipe
from lpconv.layouts import SCHEMES, Scheme
from lpconv.optim.storage import VARIANTS, Storage, Variant
from lpconv.options import option
from lpconv.results.doctor import DeviceRecord
from lpconv.scaled import fallbacks, scaled
from lpconv.scaled.rules import RULES
from lpconv.scaled.rules.nonlinear import unit
from lpconv.train.recipes import RECIPES, TRAINING_OPTIMIZERS, Arithmetic, OptimizerChoice, Recipe
from tests.helpers.bench_in_process import without_processes

E3M4 = Format(
    name="e3m4",
    exponent_bits=3,
    mantissa_bits=4,
    bias=3,
    max_exponent_field=7,
    max_mantissa=14,
    has_inf=False,
    has_nan=True,
    storage_bits=8,
)

E3M3 = dataclasses.replace(E3M4, name="e3m3", mantissa_bits=3, max_mantissa=6, storage_bits=7)
SMALL = (
    *("--steps", 1, "--batch-size", 1, "--seq-len", 16, "--eval-batches", 1, "--twin", "none"),
    "-q",
)


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    torch.set_num_threads(1)


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(w) for w in words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "e3m4", E3M4)

    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes, "e3m4")
    finite = values.isfinite()
    assert int((~finite).sum()) == 2
    assert values[finite].max() == E3M4.max == 30
    assert torch.equal(encode(values, "e3m4").view(torch.uint8)[finite], codes[finite])
    assert torch.equal(cast(values, "e3m4")[finite], values[finite])
    assert cast(torch.tensor([1.03, 1e9, 2.0**-7]), "e3m4").tolist() == [1.0, 30.0, 0.0]
    with pytest.raises(UnsupportedError, match="e3m4"):
        exponent_histogram_reference(values[finite]).num_overflow("e3m4")
    assert exponent_histogram_reference(torch.tensor([1.0, 100.0])).num_overflow(E3M3) == 1
    cpu = DeviceRecord(kind="cpu", name="CPU")
    assert "e3m4" in {support.format for support in format_support(cpu)}


def test_a_scaled_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sinc()

    op, x = torch.ops.aten.sinc.default, torch.linspace(-1, 1, 12).view(3, 4)
    plain = Model(4, 4)
    model = scaled(copy.deepcopy(plain))
    model(x)
    assert fallbacks(model) == {f"fallback {op}": 1}
    monkeypatch.setitem(RULES, op, unit)
    model = scaled(copy.deepcopy(plain))
    assert torch.equal(model(x), plain(x))
    assert fallbacks(model) == {}


def test_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Scheme("TOY", "bf16", "", 16, "lpconv", "a toy that nobody serves")
    monkeypatch.setitem(SCHEMES, "TOY", toy)

    assert toy.use in run("convert", "--list-schemes")
    document = json.loads(
        run("convert", "demo", "--scheme", "TOY", "--verify", "none", "--json", "-o", tmp_path / "out")
    )
    assert document["format"] == "bf16"


def test_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Recipe(arithmetic=Arithmetic(precision="fp8", loss_scale="logmax"), purpose="a toy that nobody trains with")
    monkeypatch.setitem(RECIPES, "toy", toy)

    assert toy.purpose in run("finetune", "--list-recipes")
    document = json.loads(run("finetune", "demo", "--recipe", "toy", *SMALL, "--json", "-o", tmp_path / "out"))
    assert document["recipe"] == "toy"
    assert math.isfinite(document["runs"][0]["losses"]["values"][0])
    assert "toy" in run("report", tmp_path / "out")


def test_an_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW in another storage: a record of what is kept, and the name that `finetune` gives it."""
    toy = Variant(name="toy", weight=Storage.PAIR, first=Storage.FP32, second=Storage.PAIR)
    monkeypatch.setitem(VARIANTS, "toy", toy)
    chosen = OptimizerChoice(bytes_per_parameter=toy.bytes_per_parameter(), variant="toy")
    monkeypatch.setitem(TRAINING_OPTIMIZERS, "toy", chosen)

    words = ["finetune", "demo", "--precision", "bf16", "--optimizer", "toy", "--json"]
    document = json.loads(run(*words, *SMALL, "-o", tmp_path / "out"))
    assert document["recipe"] == "bf16 toy"
    assert math.isfinite(document["runs"][0]["losses"]["values"][0])


def test_a_bench_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another recipe of a Linear: how its operands are cast, and that fp8 can be run so."""
    without_processes(monkeypatch)
    monkeypatch.setitem(FP8_RECIPES, "toy", fp8_recipe("max"))
    monkeypatch.setitem(BENCH_FORMATS["fp8"], "toy", None)
    monkeypatch.setitem(BENCH_METHODS, "toy", None)  # made of `BENCH_FORMATS`

    few = ("--min-iters", 3, "--min-time", 0, "--rounds", 3, "--launches", 1, "--layers", 1, "--batch", 1, "--seq", 16)
    what = ("--method", "toy", "--compile", "off", "--baseline", "bf16")
    rows = json.loads(run("bench", "demo", *what, *few, "--json", "-q"))["rows"]
    assert [(row["format"], row["method"], row["status"]) for row in rows][-1] == ("fp8", "toy", "ok")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greeting:
    """Options of a toy command."""

    times: int = option(1, "Number of greetings", Ge(1))


def greet(name: str, options: Greeting, json: Json = False) -> None:
    """Greet somebody."""
    if name == "nobody":
        raise InputError("there is nobody", hint="name somebody")
    print(" ".join([f"hello {name}"] * options.times))


def test_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in `lpconv/cli/` with the function, and its name in `COMMANDS`."""
    file = types.ModuleType("lpconv.cli.greet")
    monkeypatch.setattr(file, "greet", greet, raising=False)
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setattr("lpconv.cli.main.COMMANDS", COMMANDS | {"greet": "Train"})
    assert run("greet", "you", "--times", "2").split() == ["hello", "you"] * 2
    assert "--times" in run("greet", "--help")
    assert "greet" in typer.main.get_command(app).commands
    done = CliRunner().invoke(app, ["greet", "nobody", "--json"])
    assert done.exit_code == InputError.exit_code
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    assert "somebody" in error["hint"]
