"""An e4m3fn number and what it left: rounding and bounds over every bf16 number, in eager mode and compiled."""

import pytest
import torch
from torch import Tensor

from lpconv.mcf.pairs import join_e4m3fn, nearest_e4m3fn, split_e4m3fn

E4M3FN = torch.float8_e4m3fn
BOUNDS = {torch.bfloat16: (2.0**-13, 2.0**-19), E4M3FN: (2.0**-9, 2.0**-14)}


def every_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def dense() -> Tensor:
    """fp32 numbers of every magnitude up to 448, with full significands."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-14, 9, (200_000,), generator=generator).float()
    x = (torch.rand(200_000, generator=generator) + 1) * torch.exp2(exponents)
    return torch.cat([x, -x, torch.zeros(1)]).clamp(-448, 448)


def test_rounding_is_the_conversion() -> None:
    x = every_bf16()
    expected = x.clamp(-448, 448).to(E4M3FN).float()
    assert torch.equal(nearest_e4m3fn(x).nan_to_num(7.0), expected.nan_to_num(7.0))
    halves = torch.arange(-448, 448, 1 / 1024)  # all ties, of normal and subnormal numbers
    assert torch.equal(nearest_e4m3fn(halves), halves.to(E4M3FN).float())


@pytest.mark.parametrize("dtype", BOUNDS)
def test_bounds(dtype: torch.dtype) -> None:
    x = dense()
    hi, rest = split_e4m3fn(x, dtype)
    relative, absolute = BOUNDS[dtype]
    error = (join_e4m3fn(hi, rest) - x).abs()
    assert torch.equal(hi.float(), x.to(E4M3FN).float())
    assert bool((error <= torch.maximum(relative * x.abs(), torch.tensor(absolute))).all())
    assert float((error / x.abs().clamp(min=2**-6)).max()) > relative / 2  # the bound is not idle


def test_two_e4m3fn_parts_are_those_of_torchs_conversions() -> None:
    x = dense()
    hi = x.to(E4M3FN)
    rest = ((x - hi.float()) * 2**4).to(E4M3FN)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip((hi, rest), split_e4m3fn(x, E4M3FN), strict=True))
    assert torch.equal(join_e4m3fn(hi, rest), hi.float() + rest.float() / 2**4)


def test_beyond_the_largest_number_only_a_bf16_rest_grows() -> None:
    x = torch.tensor([1000.0, -1000.0, float("nan")])
    hi, rest = split_e4m3fn(x, torch.bfloat16)
    assert hi[:2].tolist() == [448.0, -448.0]
    assert join_e4m3fn(hi, rest)[:2].tolist() == [1000.0, -1000.0]
    assert bool(hi.float()[2].isnan())


def test_compiled_by_default_the_rest_survives() -> None:
    x = dense()[:4096]
    actual = torch.compile(split_e4m3fn)(x, torch.bfloat16)
    expected = split_e4m3fn(x, torch.bfloat16)
    assert float((expected[1] != 0).float().mean()) > 0.9
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(actual, expected, strict=True))
