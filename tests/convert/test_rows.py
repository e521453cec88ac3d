"""Conversions with `--granularity row`: what is stored, and that every command takes it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import bits_of, write_checkpoint
from convert_models import tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import lpconv.hf
from lpconv.checkpoint.contents import read_contents
from lpconv.cli.main import app
from lpconv.convert.options import ConvertOptions, settings_of
from lpconv.convert.restore import restore
from lpconv.convert.run import convert, plan
from lpconv.convert.verify_output import verify_output
from lpconv.data import demo_checkpoint
from lpconv.errors import UsageError
from lpconv.export.stored import stored_weights
from lpconv.progress import Silent
from lpconv.results import ConvertResult

FORMATS = ["fp32", "fp16", "bf16", "e4m3fn", "e5m2"]
NAME = "model.layers.1.self_attn.q_proj.weight"


def run(source: Path | str, out: Path, **options: Any) -> ConvertResult:
    return convert(str(source), out, ConvertOptions(**{"granularity": "row", "verify": "weights", **options}))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    for fmt in FORMATS:
        assert run("demo", folder / fmt, format=fmt).verify.passed
    return {f: folder / f for f in FORMATS}


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_row_has_its_own_rms_as_scale(outputs: dict[str, Path], fmt: str) -> None:
    source, stored = (load_file(p / "model.safetensors") for p in (demo_checkpoint(), outputs[fmt]))
    x, scale = source[NAME], stored[NAME + "_scale"]
    assert stored[NAME].shape == (1, *x.shape)
    assert scale.shape == (len(x), 1)
    floors = 2.0 ** (x.double().square().mean(1, keepdim=True).sqrt().log2().floor())
    assert torch.equal(scale.double(), floors)
    assert torch.equal(stored[NAME][0].float(), (x / scale).to(stored[NAME].dtype).float())
    planned = plan("demo", Path("unused"), ConvertOptions(format=fmt, granularity="row"))
    assert planned.bytes.written == (outputs[fmt] / "model.safetensors").stat().st_size


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_way_of_reading_gives_the_same_values(outputs: dict[str, Path], fmt: str, tmp_path: Path) -> None:
    restored = restore(outputs[fmt], tmp_path / "back", force=False, progress=Silent())
    assert restored.exact == (fmt == "fp32")
    plain = load_file(tmp_path / "back/model.safetensors")
    opened = lpconv.hf.load(outputs[fmt]).state_dict()
    exported = {w.name: w.value for w in stored_weights(read_contents(outputs[fmt]))}
    assert all(torch.equal(x, opened[n]) and torch.equal(x, exported[n]) for n, x in plain.items())
    verified = verify_output(
        outputs[fmt], against="demo", level="weights", gates=(), trust_remote_code=False, progress=Silent()
    )
    assert verified.passed


@pytest.mark.parametrize("scale", ["pow2", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saving_again_keeps_the_scale_of_every_row(dtype: torch.dtype, scale: str, tmp_path: Path) -> None:
    run("demo", tmp_path / "out", format="e4m3fn", scale=scale, verify="none")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    model.save_pretrained(tmp_path / "again")
    saved, stored = (load_file(tmp_path / n / "model.safetensors") for n in ("again", "out"))
    assert saved.keys() == stored.keys()
    assert all(bits_of(x) == bits_of(stored[n]) for n, x in saved.items() if n.endswith("_scale"))
    if dtype == torch.float32:
        assert all(bits_of(x) == bits_of(stored[n]) for n, x in saved.items())


def test_experts_are_merged_from_their_rows_and_saved_as_they_were(tmp_path: Path) -> None:
    source = tiny("mixtral", tmp_path / "source")
    run(source, tmp_path / "out", format="e5m2", verify="logits")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    saved, stored = (load_file(tmp_path / n / "model.safetensors") for n in ("again", "out"))
    assert saved.keys() == stored.keys()
    assert all(bits_of(x) == bits_of(stored[n]) for n, x in saved.items())


def test_an_outlier_costs_its_own_row_only(tmp_path: Path) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[3, 5] = 1e4
    write_checkpoint(tmp_path / "source", {"w": x})
    sqnr = {}
    for granularity in ("tensor", "row"):
        out = tmp_path / granularity
        run(tmp_path / "source", out, format="e4m3fn", granularity=granularity)
        restore(out, tmp_path / f"{granularity}-back", force=False, progress=Silent())
        error = load_file(tmp_path / f"{granularity}-back/model.safetensors")["w"] - x
        sqnr[granularity] = 10 * math.log10(x[8:].square().sum() / error[8:].square().sum())
    assert sqnr["row"] > 30 > sqnr["tensor"]


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e-45])
@pytest.mark.parametrize("fmt", ["fp32", "e4m3fn", "e5m2"])
def test_odd_rows(value: float, fmt: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 48).view(6, 8).clone()
    x[2], x[4, 1] = value, value
    write_checkpoint(tmp_path / "source", {"w": x, "odd": torch.ones(2, 3, 4), "v": torch.ones(5)})
    result = run(tmp_path / "source", tmp_path / "out", format=fmt, rules=())
    assert result.verify.passed
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {n: tuple(t.shape) for n, t in stored.items()} == {
        "w": (1, 6, 8), "w_scale": (6, 1), "odd": (1, 2, 3, 4), "odd_scale": (6, 1), "v": (5,),
    }  # fmt: skip


def test_bytes_do_not_depend_on_the_workers_or_the_blocks(tmp_path: Path) -> None:
    x = torch.randn(900, 710, generator=torch.Generator().manual_seed(0))
    write_checkpoint(tmp_path / "source", {"a.weight": x})
    for workers in (1, 3):
        assert run(tmp_path / "source", tmp_path / str(workers), workers=workers, format="e4m3fn").verify.passed
    one, three = ((tmp_path / n / "model.safetensors").read_bytes() for n in "13")
    assert one == three


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "column"}, "unknown granularity"),
        ({"method": "collage", "granularity": "row"}, "no scale per row"),
        ({"method": "multipoint", "granularity": "row"}, "no scale per row"),
    ],
)
def test_what_has_no_rows_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(ConvertOptions(**options))


def test_the_command_and_the_reports_say_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["convert", "demo", "--format", "e4m3fn", "--granularity", "row", "-o", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    card = (out / "README.md").read_text()
    assert "--granularity row" in card
    assert "a scale per row" in card
    for again in (["inspect", str(out)], ["verify", str(out), "--level", "weights"], ["report", str(out)]):
        assert CliRunner().invoke(app, again).exit_code == 0
