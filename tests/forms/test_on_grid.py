"""Weights that are codes times scales already come back number by number; others keep the scales that they had."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.formats.codes import nearest_
from lpconv.formats.grains import get_grain
from lpconv.formats.spec import FORMATS
from lpconv.forms import FORMS, Form, FormSettings
from lpconv.forms.blocks import Workspace
from lpconv.forms.facts import Measurement
from lpconv.forms.on_grid import OnGrid, _may_be_codes
from lpconv.layouts import LAYOUTS
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.report.convert import summary
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output

ROWS, COLS, CUT = 140, 160, 77  # tails of blocks, and blocks that end within a tile
ALL = (torch.float32, torch.bfloat16, torch.float16)
KINDS = FORMS | {x.form.kind: x.form for x in LAYOUTS.values() if x.form is not None}


def quantised(name: str, grain: str, divisor: float, scales: torch.dtype, *, pow2: bool = False) -> Tensor:
    """Random weights as a quantiser leaves them: codes times a scale that is a tile's largest magnitude / `divisor`."""
    fmt, found = FORMATS[name], get_grain(grain)
    x = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * 0.05
    height, width = found.sizes(ROWS, COLS) if found else (ROWS, COLS)
    for tile in (t for rows in x.split(height) for t in rows.split(width, 1)):
        scale = (tile.abs().max() / divisor).to(scales).float()
        scale = 2.0 ** scale.log2().ceil() if pow2 else scale
        code = (tile / scale).round().clamp(-fmt.max - 1, fmt.max) if fmt.twos_complement else None
        tile.copy_((nearest_((tile / scale).contiguous(), fmt) if code is None else code) * scale)
    return x


def stored(
    x: Tensor, name: str, grain: str, scale: str = "exact", kind: str = "tiles"
) -> tuple[Form, Measurement, Tensor]:
    """The form of some weights, what measuring them found, and the weights that are decoded; in two blocks."""
    form = KINDS[kind].of("w", (ROWS, COLS), FORMATS[name], FormSettings(scale=scale, grain=get_grain(grain)))
    flat, work, ranges = x.reshape(-1), Workspace(), [(0, CUT * COLS), (CUT * COLS, ROWS * COLS)]
    found = form.measure(lambda job: (job(flat[a:b], a, work) for a, b in ranges))
    data = [[d.clone() for d in form.encode(flat[a:b], a, found, work).data] for a, b in ranges]
    got = [form.decode(d, a, b, found.side) for d, (a, b) in zip(data, ranges, strict=True)]
    assert all(form.is_right(flat[a:b].float(), g, a, found.side) for g, (a, b) in zip(got, ranges, strict=True))
    return form, found, torch.cat(got).view(ROWS, COLS)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(
    ("name", "grain", "divisor", "scales"),
    [
        ("int4", "group:32", 7.0, torch.bfloat16),
        ("int4", "group:32", 7.5, torch.float32),  # as others round: -8 is a code
        ("int4", "group:32", 12.0, torch.float32),  # clipped, as learnt scales are
        ("e4m3fn", "row", 448.0, torch.bfloat16),
        ("e4m3fn", "row", 600.0, torch.float32),
        ("e4m3fn", "128x128", 448.0, torch.float32),
        ("e4m3fn", "tensor", 448.0, torch.float32),
        ("e5m2", "row", 57344.0, torch.bfloat16),
    ],
)
def test_numbers_come_back(name: str, grain: str, divisor: float, scales: torch.dtype, dtype: torch.dtype) -> None:
    x = quantised(name, grain, divisor, scales).to(dtype)
    _, found, got = stored(x, name, grain)
    assert found.on_grid
    assert torch.equal(got.to(dtype), x)


@pytest.mark.parametrize("divisor", [127.0, 127.5, 150.0])
def test_integers_of_eight_bits_come_back_from_fp32(divisor: float) -> None:
    x = quantised("int8", "group:80", divisor, torch.float32)
    _, found, got = stored(x, "int8", "group:80")
    assert found.on_grid
    assert torch.equal(got, x)


@pytest.mark.parametrize(
    ("name", "grain"), [("int4", "group:32"), ("e4m3fn", "tensor"), ("e4m3fn", "row"), ("e4m3fn", "128x128")]
)
def test_scales_stay_powers_of_two_where_they_are_asked_to(name: str, grain: str) -> None:
    x = quantised(name, grain, FORMATS[name].max, torch.float32, pow2=True)
    _, found, got = stored(x, name, grain, "pow2")
    assert found.on_grid
    assert torch.equal(got, x)
    (scales,) = found.side.values()
    assert bool((scales.frexp()[0] == 0.5).all())
    other = quantised(name, grain, FORMATS[name].max, torch.float32)
    assert not stored(other, name, grain, "pow2")[1].on_grid


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1"])
def test_mx_keeps_its_own_without_a_search(name: str) -> None:
    x = quantised(name, "mx", FORMATS[name].max / 1.7, torch.float32, pow2=True)
    assert torch.equal(stored(x, name, "mx", "pow2")[2], x)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize(("name", "grain"), [("int4", "group:32"), ("int8", "group:80"), ("e4m3fn", "row")])
def test_other_weights_are_read_once_and_change_nothing(name: str, grain: str, dtype: torch.dtype) -> None:
    x = quantised(name, grain, FORMATS[name].max, torch.float32).to(dtype)
    x[0, :40] += torch.randn(40, generator=torch.Generator().manual_seed(1)).to(dtype)
    form, found, _ = stored(x, name, grain)
    assert not found.on_grid
    blocks: list[Any] = []

    def over(job: Any) -> Any:
        for a, b in ((0, CUT * COLS), (CUT * COLS, ROWS * COLS)):
            blocks.append(a)
            yield job(x.view(-1)[a:b], a, Workspace())

    form.measure(over)
    assert blocks == [0, CUT * COLS]


def test_one_number_off_the_grid_in_the_last_tile_is_seen() -> None:
    x = quantised("int4", "group:32", 7.5, torch.float32)
    x[-1, -1] *= 1 + 2.0**-20
    assert not stored(x, "int4", "group:32")[1].on_grid


def test_readers_that_keep_scales_of_integers_in_bf16_get_such(tmp_path: Path) -> None:
    x = quantised("int4", "group:32", 7.5, torch.float32)
    assert not stored(x, "int4", "group:32", kind="compressed tiles")[1].on_grid
    short = quantised("int4", "group:32", 7.5, torch.bfloat16)
    _, found, got = stored(short, "int4", "group:32", kind="compressed tiles")
    assert found.on_grid
    assert torch.equal(got, short)


def test_the_record_says_so_and_verification_finds_it_again(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    weights = {"a.weight": quantised("int4", "group:32", 7.5, torch.float32).bfloat16(),
               "b.weight": quantised("e4m3fn", "row", 448.0, torch.float32),
               "c.weight": torch.randn(ROWS, COLS).bfloat16()}  # fmt: skip
    random = torch.Generator().manual_seed(13)
    weights["d.weight"] = torch.randn(ROWS, COLS, generator=random).bfloat16()
    weights["d.weight"][torch.rand(ROWS, COLS, generator=random) > 0.1] = 0  # pruned
    weights["c.weight"][0, :32] = weights["a.weight"][0, :32]  # as in some rows of SmolLM2
    save_file(weights, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    options = ConvertOptions(format="int4", granularity="group:32", verify="weights", allow_missing=True)
    result = convert(str(tmp_path / "source"), tmp_path / "out", options)
    records = {t.name: t for t in result.tensors}
    assert [records[n].on_grid for n in weights] == [True, False, False, False]
    assert [records[n].grid for n in weights] == ["int4", "e4m3fn", None, None]
    assert re.search(r"\b1 of ", summary(result))
    assert re.search(r"`b\.weight`: .*e4m3fn", " ".join(result.warnings))
    noise = records["a.weight"].sqnr_db
    assert noise is not None
    assert 50 < noise < math.inf  # what rounding to bf16 took
    found = verify_output(
        tmp_path / "out", VerifyOptions(against=str(tmp_path / "source"), level="weights"), progress=Silent()
    )
    assert found.passed


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1", "int4", "int8"])
def test_the_quick_look_refuses_no_weight_that_fits(name: str, dtype: torch.dtype) -> None:
    """Whatever scale its codes have, and in every dtype that holds them."""
    fmt, generator = FORMATS[name], torch.Generator().manual_seed(0)
    for scale in torch.rand(300, generator=generator).mul_(8).exp2_().mul_(2**-9):
        x = (torch.randn(16, generator=generator) * fmt.max / 4).clamp(-fmt.max, fmt.max)
        codes = x.round() if fmt.twos_complement else nearest_(x, fmt)
        sample = (codes * scale).to(dtype)
        if sample.any():
            assert OnGrid(format=fmt, has_pow2_scale=False)._may_fit(sample)
            assert _may_be_codes(sample)
