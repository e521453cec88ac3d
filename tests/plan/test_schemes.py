"""`--scheme`: a name stands for the options that it lists, and its figures are those of what is written."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.errors import UsageError
from lpconv.formats.grains import get_grain
from lpconv.layouts import SCHEMES
from lpconv.layouts.compressed_config import preset_of
from lpconv.layouts.linears import LinearModules
from lpconv.plan import ConvertOptions, fill_options
from lpconv.plan.plan import make_plan
from lpconv.plan.settings import with_scheme
from lpconv.storage.header import TensorInfo

ROWS, COLUMNS = 2048, 4096
WEIGHT = "model.layers.0.mlp.down_proj.weight"


def options_of_scheme(name: str) -> ConvertOptions:
    return ConvertOptions(scheme=name, calibrate="demo" if SCHEMES[name].calibrated else None)


@pytest.mark.parametrize("name", SCHEMES)
def test_bits_are_those_of_the_plan(name: str) -> None:
    options = fill_options(options_of_scheme(name))
    info = TensorInfo(name=WEIGHT, dtype="F32", shape=(ROWS, COLUMNS), begin=0, end=ROWS * COLUMNS * 4)
    experts = LinearModules(plain=(), others=(), fused=frozenset((WEIGHT,)), family="gpt_oss")
    linears = experts if options.layout == "mxfp4" else None
    plan = make_plan({WEIGHT: (info, "model.safetensors")}, options, ties={}, linears=linears)
    (tensor,) = plan.tensors
    assert tensor.form.num_bytes * 8 / (ROWS * COLUMNS) == pytest.approx(SCHEMES[name].bits, abs=0.006)


@pytest.mark.parametrize("name", [n for n, s in SCHEMES.items() if s.options.get("layout") == "compressed-tensors"])
def test_names_of_compressed_tensors_are_its_presets(name: str) -> None:
    options = fill_options(options_of_scheme(name))
    grain = get_grain(options.granularity)
    preset = preset_of(str(options.format), grain, options.rounds_inputs)
    assert preset is not None
    assert preset.name == name


@pytest.mark.parametrize(
    "options",
    [
        ConvertOptions(scheme="FP8_DYNAMIC", layout="mlx"),
        ConvertOptions(scheme="FP8_DYNAMIC", method="collage"),
        ConvertOptions(scheme="NVFP4"),
        ConvertOptions(scheme="FP8_DYNAMIC", inputs="none"),
        ConvertOptions(scheme="MXFP4", calibrate="demo"),
        ConvertOptions(format="e2m1", inputs="dynamic"),
        ConvertOptions(scheme="NVFP5"),
    ],
)
def test_contradictions_are_refused(options: ConvertOptions) -> None:
    with pytest.raises(UsageError):
        fill_options(options)


@pytest.mark.parametrize(
    ("scheme", "given"),
    [
        ("FP8_DYNAMIC", {"granularity": "mx"}),
        ("FP8_DYNAMIC", {"layout": "lpconv"}),
        ("FP8_DYNAMIC", {"method": "scalify"}),
        ("W4A16", {"granularity": "group:64"}),
        ("W4A16", {"format": "int8"}),
        ("COLLAGE", {"residual": "int8"}),
        ("FP8", {"granularity": "row"}),  # now without input scales, so without a text, too
        ("FP8", {"layout": "lpconv"}),
        ("MXFP4", {"inputs": "none"}),
    ],
)
def test_an_option_replaces_what_the_scheme_would_set(scheme: str, given: dict[str, str]) -> None:
    filled = fill_options(ConvertOptions(scheme=scheme, **given))  # type: ignore[arg-type]  # all are strings
    expected = {"method": "unit"} | SCHEMES[scheme].options | given
    assert {name: getattr(filled, name) for name in expected} == expected


@pytest.mark.parametrize(("typed", "meant"), [("MXFP4A61", "MXFP4A16"), ("w4a61", "W4A16"), ("FP8_DYN", "FP8_DYNAMIC")])
def test_an_unknown_scheme_gets_the_one_that_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as raised:
        with_scheme(ConvertOptions(scheme=typed))
    assert f"`{meant}`" in str(raised.value.hint)


def test_the_command_line_converts_by_scheme_and_lists_schemes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["convert", "demo", "--scheme", "FP8_DYNAMIC", "--verify", "weights", "-q"])
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "demo-FP8_DYNAMIC" / "lpconv.json").exists()
    listed = CliRunner().invoke(app, ["convert", "--list-schemes"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in SCHEMES)


@pytest.mark.parametrize("arguments", [("--list-schemes", "--json"), ("--json", "--list-schemes")])
def test_the_list_of_schemes_can_be_json(arguments: tuple[str, ...]) -> None:
    listed = CliRunner().invoke(app, ["convert", *arguments])
    assert [row["scheme"] for row in json.loads(listed.stdout)["rows"]] == [*SCHEMES]
