"""Rounding agrees with ml_dtypes and gfloat everywhere, and its special values are what the table says."""

import math

import pytest
import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats.cast import Overflow, Rounding, cast, largest_number
from lpconv.formats.spec import FORMATS, get_format
from tests.helpers.format_oracles import (
    GFLOAT,
    ML_DTYPES,
    every_16_bit,
    every_value,
    gfloat_round,
    ml_dtypes_round,
    same,
)

NAN, INF = math.nan, math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS: list[Rounding] = ["nearest", "toward_zero", "stochastic"]
SMALL = [n for n, f in FORMATS.items() if f.bits <= 16]
SIGNED = [n for n, f in FORMATS.items() if f.has_sign]


def own_overflow(name: str) -> Overflow:
    """What ml_dtypes does on overflow: Inf where the format has one, else NaN, else the largest number."""
    spec = FORMATS[name]
    return "inf" if spec.has_inf else "nan" if spec.has_nan else "saturate"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in ML_DTYPES if FORMATS[n].has_sign and n != "int16"])  # 32767 has 15 bits
def test_every_16_bit_input_as_ml_dtypes(name: str, dtype: torch.dtype) -> None:
    x = every_16_bit(dtype)
    if not FORMATS[name].has_nan:
        x = x[~x.isnan()]
    assert same(cast(x, name, overflow=own_overflow(name)), ml_dtypes_round(x, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
def test_every_16_bit_input_saturating_as_gfloat(name: str, dtype: torch.dtype, rounding: Rounding) -> None:
    x = every_16_bit(dtype)
    x = x[x.isfinite()]
    expected = gfloat_round(x.double(), name, toward_zero=rounding == "toward_zero")
    limit = largest_number(name, dtype)
    assert same(cast(x, name, rounding=rounding), expected.clamp(-limit, limit).to(dtype))


@pytest.mark.parametrize("name", [n for n in SMALL if FORMATS[n].has_sign])
def test_every_midpoint_and_its_neighbours_in_fp32_as_ml_dtypes_and_gfloat(name: str) -> None:
    values = every_value(name)
    middle = ((values[1:] + values[:-1]) / 2).float()
    x = torch.cat([middle, torch.nextafter(middle, middle + 1e30), torch.nextafter(middle, middle - 1e30)])
    assert same(cast(x, name), ml_dtypes_round(x, name))
    if name in GFLOAT:
        assert same(cast(x, name), gfloat_round(x, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_numbers_of_the_format_come_back_unchanged(name: str, dtype: torch.dtype) -> None:
    values = every_value(name)
    values = values[(values.to(dtype).double() == values) & ((values != 0) | FORMATS[name].has_zero)].to(dtype)
    for rounding in ROUNDINGS:
        assert same(cast(values, name, rounding=rounding), values)


def test_tf32_keeps_ten_bits_of_fp32() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=seeded(0)).to(torch.int32)
    bits = torch.cat([bits, bits & ~0xFFF, (bits & ~0x1FFF) | 0x1000])  # ties too
    expected = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)  # half to even on the 13 low bits
    x = bits.view(torch.float32)
    assert same(cast(x, "tf32", overflow="inf"), torch.where(x.isnan(), x, expected))


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    spec = FORMATS[name]
    top = largest_number(name, dtype)
    minus_zero = -0.0 if spec.has_negative_zero else 0.0
    x = torch.tensor([NAN, INF, -INF, 0.0, -0.0, top, -top], dtype=dtype)
    table = {
        "saturate": [NAN, top, -top, 0.0, minus_zero, top, -top],
        "inf": [NAN, INF, -INF, 0.0, minus_zero, top, -top],
        "nan": [NAN, NAN, NAN, 0.0, minus_zero, top, -top],
    }
    rules: list[Overflow] = ["saturate", "inf", "nan"]
    for rule in rules:
        if (rule == "inf" and not spec.has_inf) or (rule == "nan" and not spec.has_nan):
            continue
        for rounding in ROUNDINGS:
            got = cast(x, name, rounding=rounding, overflow=rule)
            assert same(got, torch.tensor(table[rule], dtype=dtype)), (rule, rounding)


# The first float64 that no longer rounds to the largest number: half a step beyond it, or just above where the largest
# number is even and so wins the tie.
OVERFLOW_EDGES = {
    "bf16": (2 - 2**-8) * 2.0**127, "fp16": 65520.0, "e5m2": 61440.0, "e5m2fnuz": 61440.0, "e4m3fnuz": 248.0,
    "e4m3fn": math.nextafter(464.0, INF), "tf32": (2 - 2**-11) * 2.0**127, "fp32": (2 - 2**-24) * 2.0**127,
}  # fmt: skip


@pytest.mark.parametrize(("name", "edge"), OVERFLOW_EDGES.items())
def test_where_overflow_begins(name: str, edge: float) -> None:
    spec = FORMATS[name]
    x = torch.tensor([edge, math.nextafter(edge, 0), -edge], dtype=torch.float64)
    beyond = INF if spec.has_inf else NAN
    expected = torch.tensor([beyond, spec.max, -beyond], dtype=torch.float64)
    assert same(cast(x, name, overflow=own_overflow(name)), expected)
    assert same(cast(x, name), torch.tensor([spec.max, spec.max, -spec.max], dtype=torch.float64))
    assert same(cast(x, name, rounding="toward_zero", overflow=own_overflow(name)), cast(x, name))


def test_e8m0fnu_has_neither_zero_nor_sign() -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-140, 1.49, 1.5, 3.0, -1.0, INF, -INF, NAN])
    low, top = 2.0**-127, 2.0**127
    assert same(cast(x, "e8m0fnu"), torch.tensor([low, low, low, 1.0, 2.0, 4.0, NAN, top, NAN, NAN]))
    normal = every_16_bit(torch.bfloat16)
    normal = normal[normal >= 2.0**-126]  # below, ml_dtypes and torch both send 1.02 · 2^-127 up to 2^-126
    assert same(cast(normal, "e8m0fnu", overflow="nan"), ml_dtypes_round(normal, "e8m0fnu"))


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3fn", "e5m2", "e2m1"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("band", ["normal", "subnormal"])
def test_stochastic_rounding_is_unbiased(name: str, fraction: float, sign: int, band: str) -> None:
    spec = get_format(name)
    low = spec.min_normal if band == "normal" else 0.0
    x = sign * (low + fraction * spec.min_subnormal)
    draws = 100_000
    y = cast(torch.full((draws,), x, dtype=torch.float64), name, rounding="stochastic", generator=seeded(1))
    steps = (y * sign - low) / spec.min_subnormal
    assert set(steps.tolist()) == {0.0, 1.0}  # never past a neighbour
    standard_error = math.sqrt(fraction * (1 - fraction) / draws)
    assert abs(steps.mean().item() - fraction) < 4 * standard_error


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_stochastic_rounding_repeats_with_its_seed() -> None:
    x = torch.randn(1000)
    first = cast(x, "e4m3fn", rounding="stochastic", generator=seeded(7))
    assert same(first, cast(x, "e4m3fn", rounding="stochastic", generator=seeded(7)))
    assert not same(first, cast(x, "e4m3fn", rounding="stochastic", generator=seeded(8)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_strides(dtype: torch.dtype) -> None:
    x = torch.randn(12, 10).to(dtype)
    whole = cast(x, "e4m3fn")
    for index in (..., (slice(None, None, 2), slice(1, None, 3)), slice(0, 0), (0, 0)):
        assert same(cast(x[index], "e4m3fn"), whole[index])
    assert same(cast(x.t(), "e4m3fn"), whole.t())
    assert same(cast(x[:, :1].expand(12, 10), "e4m3fn"), whole[:, :1].expand(12, 10))


def test_the_gradient_is_straight_through() -> None:
    x = torch.tensor([0.3, 1e6, -INF, 1e-9], requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (cast(x, "e4m3fn") * weights).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == weights.tolist()
    with torch.no_grad():
        assert not cast(x, "e4m3fn").requires_grad


def test_the_input_is_not_changed() -> None:
    x = torch.randn(100)
    before = x.clone()
    cast(x, "e2m1")
    assert same(x, before)


@pytest.mark.parametrize(
    ("x", "name", "options", "hint"),
    [
        (torch.ones(2), "e4m3fm", {}, "`e4m3fn`"),
        (torch.ones(2), "e4m3fn", {"overflow": "inf"}, "`saturate` or `nan`"),
        (torch.ones(2), "e2m1", {"overflow": "nan"}, "`saturate`"),
        (torch.ones(2), "e4m3fn", {"overflow": "wrap"}, "known"),
        (torch.ones(2), "e4m3fn", {"rounding": "up"}, "known"),
        (torch.ones(2, dtype=torch.int32), "e4m3fn", {}, "float32"),
        (torch.ones(2, dtype=torch.float8_e5m2), "e4m3fn", {}, "decode"),
    ],
)
def test_bad_arguments_are_refused_with_a_hint(x: Tensor, name: str, options: dict[str, str], hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        cast(x, name, **options)  # type: ignore[arg-type]
    assert hint in (caught.value.hint or "")
