"""Codes from a table are those of the encoder, and so is their error, to the last bit."""

import functools
import math

import pytest
import torch
from torch import Tensor

from lpconv.formats.grains import find_grain
from lpconv.formats.spec import FORMATS
from lpconv.forms import codes as module
from lpconv.forms.blocks import Workspace, block_error, num_zeros
from lpconv.forms.facts import FormSettings
from lpconv.forms.scaled import ScaledCodes
from lpconv.layouts.compressed_tensors import CompressedTiles

NUM = 2**16
NUMBERS = torch.randn(NUM, generator=torch.Generator().manual_seed(0)) * 0.02
BLOCKS = {
    "normal": NUMBERS,
    "none is lost": NUMBERS.abs() + 0.01,
    "mostly lost": NUMBERS**9,
    "tiny": NUMBERS * 2.0**-120,
    "zeros": NUMBERS * 0,
    "an outlier": torch.cat([NUMBERS[1:], torch.tensor([300.0])]),
    "infinite": torch.cat([NUMBERS[2:], torch.tensor([math.inf, math.nan])]),
}


def encoded(x: Tensor, fmt: str) -> tuple[Tensor, object, bool]:
    """Codes and error, and whether a table gave them."""
    before, work = module._table.cache_info(), Workspace()
    form = ScaledCodes(name="w", shape=x.shape, format=FORMATS[fmt])
    found = form.encode(x, 0, form.measure(lambda job: [job(x, 0, work)]), work)
    return found.data[0].clone(), found.error, module._table.cache_info() != before


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_table_gives_what_the_encoder_gives(
    block: str, dtype: torch.dtype, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = BLOCKS[block].to(dtype)
    codes, error, looked = encoded(x, fmt)
    assert looked == (block != "infinite")
    monkeypatch.setattr(module, "_LEAST_ELEMENTS", NUM + 1)
    wanted, wanted_error, looked = encoded(x, fmt)
    assert not looked
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert error == wanted_error


def tiled(x: Tensor, fmt: str, grain: str, scale: str = "pow2") -> tuple[Tensor, object, bool]:
    """As `encoded`, with scales for tiles of rows of 256 numbers."""
    module._joined.cache_clear()  # a joined table from an earlier test would hide the lookup
    before, work, rows = module._table.cache_info(), Workspace(), x.view(-1, 256)
    settings = FormSettings(grain=find_grain(grain), scale=scale)
    form = CompressedTiles.of("w", tuple(rows.shape), FORMATS[fmt], settings)
    found = form.encode(x, 0, form.measure(lambda job: [job(x, 0, work)]), work)
    return found.data[0].clone(), found.error, module._table.cache_info() != before


@pytest.mark.parametrize(
    ("fmt", "grain"),
    [("e4m3fn", "row"), ("e5m2", "mx"), ("e4m3fn", "128x128"), ("e2m1", "mx"), ("int8", "group:64"), ("e2m1", "nvfp4")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_with_scales_far_apart_are_looked_up_too(
    dtype: torch.dtype, fmt: str, grain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales in e4m3fn, of NVFP4, are looked up over a power of two."""
    lowest, highest = (-1, 0) if grain == "nvfp4" else (-4, 4)
    x = (NUMBERS.view(256, 256) * torch.logspace(lowest, highest, 256, base=2).view(-1, 1)).view(-1).to(dtype)
    if grain != "nvfp4":
        x[: 5 * 256] = 0
    codes, error, looked = tiled(x, fmt, grain)
    assert looked
    monkeypatch.setattr(module, "_LEAST_ELEMENTS", NUM + 1)
    wanted, wanted_error, looked = tiled(x, fmt, grain)
    assert not looked
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert error == wanted_error


def test_what_is_wanted_of_scales_in_e4m3fn_is_what_the_reference_says() -> None:
    rows = (NUMBERS.view(-1, 16) * 0.5).bfloat16().float()
    scales = (rows.abs().amax(1, keepdim=True) / 6 * 2**12).to(torch.float8_e4m3fn).float() / 2**12
    value = rows.view(-1)
    wanted = module.reference_values(value, scales.view(-1, 1), FORMATS["e2m1"])
    assert module._span_of_scales(scales) is not None
    assert torch.equal(wanted, module._reference(value, scales, FORMATS["e2m1"]))


@pytest.mark.parametrize(
    ("fmt", "grain", "scale", "spread"),
    [("e4m3fn", "row", "pow2", 80), ("e4m3fn", "row", "exact", 1), ("e2m1", "nvfp4", "exact", 1)],
)
def test_scales_too_far_apart_and_others_than_powers_of_two_are_not_looked_up(
    fmt: str, grain: str, scale: str, spread: int
) -> None:
    x = (NUMBERS.view(256, 256) * torch.logspace(-spread, 0, 256, base=2).view(-1, 1)).view(-1).bfloat16()
    assert not tiled(x, fmt, grain, scale)[2]


def test_a_scale_that_is_no_power_of_two_leaves_no_room_for_codes() -> None:
    assert module._table(torch.bfloat16, 0.3, FORMATS["e4m3fn"]) is None


def test_zeros_of_both_signs_are_counted() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-140, math.inf, math.nan])
    assert [num_zeros(x.to(t)) for t in (torch.float32, torch.bfloat16, torch.float8_e5m2)] == [2, 3, 3]


@pytest.mark.parametrize("flushed", [1e-9, 2e-9])
def test_an_error_is_the_same_where_flushed_numbers_are_known(flushed: float) -> None:
    wanted = torch.tensor([1.0, -2.0, 0.0, flushed, -flushed])
    got = torch.tensor([1.125, -2.0, 0.0, 0.0, -0.0])
    assert block_error(wanted, got.clone(), num_flushed=2) == block_error(wanted, got.clone())


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [2.0**-6, 0.013])
def test_codes_are_wanted_where_the_reference_says_so_and_nowhere_else(
    scale: float, dtype: torch.dtype, fmt: str
) -> None:
    x, work = NUMBERS.to(dtype), Workspace()
    x[:2] = torch.tensor([0.0, -0.0])
    codes = (x.float() / scale).to(getattr(torch, FORMATS[fmt].torch or "")).clone()
    got = module.decode(codes, scale)
    assert torch.equal(module.reference_values(x.float(), scale, FORMATS[fmt]), got)
    assert module.are_reference_codes(x, codes, scale, FORMATS[fmt], work)
    for at in (0, 1, 7, NUM - 1):
        for bit in (1, 128):
            changed = codes.clone()
            changed.view(torch.uint8)[at] ^= bit
            assert not module.are_reference_codes(x, changed, scale, FORMATS[fmt], work)
    x[9] = math.nan
    assert not module.are_reference_codes(x, codes, scale, FORMATS[fmt], work)


def test_codes_of_tiles_are_wanted_by_the_scale_of_each() -> None:
    rows = (NUMBERS.view(256, 256) * torch.logspace(-4, 4, 256, base=2).view(-1, 1)).bfloat16()
    scales = torch.exp2(torch.log2(rows.float().square().mean(1, keepdim=True).sqrt()).floor())
    codes = (rows.float() / scales).to(torch.float8_e4m3fn)
    check = functools.partial(module.are_reference_codes, rows.view(-1), fmt=FORMATS["e4m3fn"], work=Workspace())
    assert check(codes.view(-1), scales)
    assert not check(codes.view(-1), scales.roll(1))
    assert not check(codes.view(-1), scales * 1.5), "those are not looked up"
