"""Conversions with `--granularity`: what is stored, and that every command takes it."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lpconv.formats
import lpconv.hf
from lpconv.convert.restore import restore
from lpconv.convert.run import convert, plan
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, UsageError
from lpconv.export.rewrite import stored_weights
from lpconv.layouts import LAYOUTS
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions, FormatRule
from lpconv.plan.settings import command_line, fill_options, shaping_options
from lpconv.progress import Silent
from lpconv.results import ConvertResult
from lpconv.storage.checkpoint import Checkpoint
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import bits_of, write_checkpoint

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


def test_each_tile_has_the_rms_of_its_own(tmp_path: Path) -> None:
    """Tiles at the edges are smaller, and rows of a tile come in several blocks."""
    x = torch.randn(300, 2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 300).unsqueeze(1)
    x[130:, 256:384] = 0
    write_checkpoint(tmp_path / "source", {"w": x})
    assert run(tmp_path / "source", tmp_path / "out", format="e4m3fn", granularity="128x128").verify.passed
    scale = load_file(tmp_path / "out/model.safetensors")["w_scale"]
    assert scale.shape == (3, 16)
    for i, j in itertools.product(range(3), range(16)):
        tile = x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].double()
        least = 2.0 ** (tile.abs().max() / 448).log2().ceil() if tile.any() else 0.0
        rms = 2.0 ** tile.square().mean().sqrt().log2().floor() if tile.any() else 1.0
        assert float(scale[i, j]) == max(least, rms), (i, j)


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e2m1"])
def test_mx_is_what_torchao_makes(element: str, tmp_path: Path) -> None:
    """Scales of 8 bits are rounded up (RCEIL), those of 4 bits let the largest number round to 6 (EVEN)."""
    from torchao.prototype.mx_formats import mx_tensor

    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 512).unsqueeze(1)
    x[5] = torch.tensor([448.0, 0.5, 0.25, -1.25, 2.5, -3.5, 5.0, 1.75]).repeat(32)
    x[6] = torch.tensor([6.0, 0.25, 0.75, -1.25, 2.5, -3.5, 5.0, -0.0]).repeat(32)
    x[7, :32] = 0
    write_checkpoint(tmp_path / "source", {"w": x})
    assert run(tmp_path / "source", tmp_path / "out", format=element, granularity="mx").verify.passed
    stored = load_file(tmp_path / "out/model.safetensors")
    dtype = getattr(torch, lpconv.formats.FORMATS[element].torch or "")
    mode = mx_tensor.ScaleCalculationMode.EVEN if element == "e2m1" else mx_tensor.ScaleCalculationMode.RCEIL
    scale, codes = mx_tensor.to_mx(x, dtype, 32, mode)
    theirs = scale.view(torch.uint8).view(512, 8)
    assert (int(theirs[7, 0]), int(stored["w_scale"][7, 0])) == (0, 127)  # of zeros: theirs is 2^-127, ours 1
    theirs[7, 0] = 127
    assert torch.equal(stored["w_scale"], theirs)
    assert torch.equal(stored["w"].view(torch.uint8).view(512, -1), codes.view(torch.uint8).view(512, -1))


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize(("element", "ends"), [("int4", (7.5, 8.5)), ("int8", (127, 128))])
def test_the_scale_of_integers_is_that_of_the_end_at_which_the_largest_lies(
    element: str, ends: tuple[float, float], size: int, tmp_path: Path
) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 64).unsqueeze(1)
    x[3], x[4], x[5, :200] = x[3].abs(), -x[4].abs(), 0
    write_checkpoint(tmp_path / "source", {"w": x})
    done = run(tmp_path / "source", tmp_path / "out", format=element, granularity=f"group:{size}")
    assert done.verify.passed
    groups = x.double().view(64, -1, size)
    wanted = torch.maximum(groups.amax(-1) / ends[0], -groups.amin(-1) / ends[1])
    wanted = torch.where(wanted == 0, 1.0, wanted).float().bfloat16().float()
    found = load_file(tmp_path / "out/model.safetensors")["w_scale"]
    assert torch.equal(found, wanted)
    with StoredTensors.open(tmp_path / "out") as stored:
        error = (stored.tensor("w") - x).abs().view(64, -1, size) / found.unsqueeze(2)
    assert error.max() <= 0.5 + ends[1] * 2.0**-8  # half a step, and what bf16 takes of a scale


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)], ids=str)
def test_tensors_without_elements_come_back(shape: tuple[int, int], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", {"w": torch.ones(4, 4), "empty": torch.empty(shape)})
    result = run(tmp_path / "source", tmp_path / "out", format="e4m3fn", granularity="row", verify="weights")
    assert result.verify.passed
    restore(tmp_path / "out", tmp_path / "back", force=False, progress=Silent())
    assert load_file(tmp_path / "back/model.safetensors")["empty"].shape == shape


@pytest.mark.parametrize(("scale", "taken"), [("pow2", "pow2"), ("exact", "exact"), (None, "exact")])
def test_integers_have_exact_scales_and_are_warned_of_powers_of_two(scale: str | None, taken: str) -> None:
    asked = ConvertOptions(granularity="group:32", scale=scale)
    planned = plan("demo", Path("unused"), asked)
    assert {t.format for t in planned.tensors if t.name == NAME} == {"int4"}
    assert any("--scale exact" in w for w in planned.warnings) == (taken == "pow2")
    filled = fill_options(asked)
    assert filled.scale == taken
    assert ("--scale" in command_line("demo", filled)) == (taken == "pow2")


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_way_of_reading_gives_the_same_values(outputs: dict[str, Path], fmt: str, tmp_path: Path) -> None:
    restored = restore(outputs[fmt], tmp_path / "back", force=False, progress=Silent())
    assert restored.exact == (fmt == "fp32")
    plain = load_file(tmp_path / "back/model.safetensors")
    opened = lpconv.hf.load(outputs[fmt]).state_dict()
    exported = {w.name: w.value for w in stored_weights(Checkpoint.open(outputs[fmt]))}
    assert all(torch.equal(x, opened[n]) and torch.equal(x, exported[n]) for n, x in plain.items())
    verified = verify_output(outputs[fmt], VerifyOptions(against="demo", level="weights"), progress=Silent())
    assert verified.passed


@pytest.mark.parametrize(
    "asked",
    [
        {"scale": "pow2"},
        {"scale": "exact"},
        {"granularity": "128x128"},
        {"granularity": "mx"},
        {"granularity": "mx", "format": "e2m1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saving_again_keeps_every_scale(dtype: torch.dtype, asked: dict[str, str], tmp_path: Path) -> None:
    run("demo", tmp_path / "out", **{"format": "e4m3fn", "verify": "none", **asked})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    model.save_pretrained(tmp_path / "again")
    saved, stored = (load_file(tmp_path / n / "model.safetensors") for n in ("again", "out"))
    assert saved.keys() == stored.keys()
    assert all(bits_of(x) == bits_of(stored[n]) for n, x in saved.items() if n.endswith("_scale"))
    if asked.get("scale") != "exact":  # bf16 holds such codes, at scales that are powers of two
        narrow = [n for n, x in stored.items() if x.dtype.itemsize == 1 and n + "_scale" in stored]
        assert len(narrow) == 28
        assert all(bits_of(saved[n]) == bits_of(stored[n]) for n in narrow)
    if dtype == torch.float32:
        assert all(bits_of(x) == bits_of(stored[n]) for n, x in saved.items())


def test_nan_has_no_code_in_four_bits(tmp_path: Path) -> None:
    x = torch.ones(4, 32)
    x[2, 1] = math.nan
    write_checkpoint(tmp_path / "source", {"w": x})
    with pytest.raises(InputError, match=r"`w`.*NaN.*Inf.*e2m1"):
        run(tmp_path / "source", tmp_path / "out", format="e2m1", granularity="mx")
    assert not (tmp_path / "out").exists()


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


def test_a_new_layout_is_refused_with_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout is known by its record, and by nothing else."""
    monkeypatch.setitem(LAYOUTS, "toy", dataclasses.replace(LAYOUTS["transformers"], name="toy"))
    monkeypatch.setattr("lpconv.plan.settings.check", lambda options: None)  # of which it is no choice yet

    with pytest.raises(UsageError, match=r"`toy`.* fp16") as refusal:
        fill_options(ConvertOptions(layout="toy"))
    assert "--format e4m3fn with --granularity 128x128 or" in (refusal.value.hint or "")


def test_options_that_shape_the_bytes_are_recorded_and_in_the_command() -> None:
    """What decides bytes stands in `shaping_options`, and each option that is not its default in the command line."""
    rules = (FormatRule(pattern="*x", format="keep"),)
    asked = fill_options(ConvertOptions(exclude=("a", "b"), rules=rules, max_shard_size=9))
    assert command_line("demo", asked) == (
        "lpconv convert demo --method unit --format fp16 --exclude a --exclude b --rule '*x=keep' --max-shard-size 9"
    )
    assert shaping_options(asked)["rules"] == [{"pattern": "*x", "format": "keep"}]
    for name in ("workers", "max_memory", "resume", "force", "cache"):
        changed = dataclasses.replace(asked, **{name: 1})
        assert command_line("demo", changed) == command_line("demo", asked)
        assert shaping_options(changed) == shaping_options(asked)


@pytest.mark.parametrize("rounding", [{}, {"rounding": "gptaq", "calibrate": "demo", "scale": "search"}], ids=str)
def test_each_bit_of_integers_keeps_more_of_the_model(rounding: dict[str, Any], tmp_path: Path) -> None:
    divergences = []
    for bits in (2, 3, 5, 6, 7):
        tokens = 512 if rounding else None
        asked = ConvertOptions(format=f"int{bits}", verify="logits", calibration_tokens=tokens, **rounding)
        result = convert(str(demo_checkpoint()), tmp_path / f"int{bits}", asked)
        assert result.verify is not None
        assert result.verify.logits is not None
        divergences.append(result.verify.logits.mean_kl)
    assert all(wide < narrow / 2 for narrow, wide in itertools.pairwise(divergences)), divergences
