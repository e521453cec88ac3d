"""The fast rounding gives the reference's bits: every format, dtype, rule and layout, eager and compiled."""

import math
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.formats import codes
from lpconv.formats.cast import Overflow, cast, largest_number
from lpconv.formats.spec import FORMATS
from lpconv.kernels import quantise
from lpconv.kernels.compiled import CheckedKernel
from lpconv.kernels.quantise import encode, fake_quantise
from tests.helpers.format_oracles import same

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIGNED = [n for n, f in FORMATS.items() if f.has_sign]


@cache
def inputs(dtype: torch.dtype) -> Tensor:
    """Every pattern of bfloat16 or float16; for the wider dtypes random float32 patterns, with many ties among them."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    bits = torch.randint(-(2**31), 2**31, (8000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    near = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    ties = torch.cat([bits & ~0xFFF, (bits & ~0x1FFF) | 0x1000, (bits & ~0xFFFF) | 0x8000])
    small = torch.arange(2**16, dtype=torch.int32)[::4].to(torch.int16).view(torch.float16).float()  # ties of 8 bits
    return torch.cat([near, near * 200, near * 1e-5, small, bits.view(torch.float32), ties.view(torch.float32)]).to(
        dtype
    )


def rules(name: str) -> list[Overflow]:
    spec = FORMATS[name]
    known: list[Overflow] = ["saturate", "inf", "nan"]
    return [r for r in known if not (r == "inf" and not spec.has_inf) and not (r == "nan" and not spec.has_nan)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_are_the_references(name: str, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    assert same(fake_quantise(x, name), cast(x, name))
    some = x[::13]
    for overflow in rules(name):
        assert same(fake_quantise(some, name, overflow=overflow), cast(some, name, overflow=overflow)), overflow
    assert same(fake_quantise(some, name, rounding="toward_zero"), cast(some, name, rounding="toward_zero"))


@pytest.mark.parametrize(
    ("dtype", "names"), [(torch.float32, ["e4m3fn", "fp16", "bf16"]), (torch.bfloat16, ["e5m2", "e2m1"])]
)
def test_compiled_gives_the_same_bits(dtype: torch.dtype, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(dtype)
    monkeypatch.setenv("LPCONV_COMPILE", "always")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs eagerly")
        for name in names:
            assert same(fake_quantise(x, name), cast(x, name)), name


def test_compiled_noise_is_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(torch.float32)
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    eager = fake_quantise(x, "e5m2", rounding="stochastic", generator=first)
    monkeypatch.setenv("LPCONV_COMPILE", "always")
    assert same(fake_quantise(x, "e5m2", rounding="stochastic", generator=second), eager)
    assert not quantise._STOCHASTIC.fallback_reason


CPU = torch.device("cpu")


def test_a_compiler_that_drops_the_rounding_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = CheckedKernel(quantise._NEAREST.function, quantise._NEAREST.examples)
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda x, out, *rest: out.copy_(x))
    x, out, *rest = kernel.examples(torch.float32, CPU)
    with pytest.warns(UserWarning, match="rounding"):
        result = kernel(x, out, *rest)
    assert same(result, cast(x, "e4m3fn", overflow="nan"))
    assert "changed" in kernel.fallback_reason["float32 on cpu"]
    monkeypatch.setenv("LPCONV_COMPILE", "always")
    assert not kernel.wants(x)
    assert kernel.wants(x.bfloat16())


def test_a_compiler_that_fails_leaves_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: Tensor) -> Tensor:
        raise RuntimeError("no C++ compiler")

    kernel = CheckedKernel(quantise._NEAREST.function, quantise._NEAREST.examples)
    monkeypatch.setattr(torch, "compile", lambda function, **options: no_compiler)
    arguments = kernel.examples(torch.float32, CPU)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert same(kernel(*arguments), cast(arguments[0], "e4m3fn", overflow="nan"))


@pytest.mark.parametrize("name", ["bf16", "tf32", "fp16", "e4m3fn", "e5m2", "e2m3", "e2m1"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("band", ["normal", "subnormal"])
def test_stochastic_rounding_is_unbiased(name: str, fraction: float, sign: int, band: str) -> None:
    spec = FORMATS[name]
    low = 1.0 if band == "normal" else 0.0
    step = spec.eps if band == "normal" else spec.min_subnormal
    x = torch.full((50_000,), low + fraction * step) * sign
    share = ((x[0].abs().double() - low) / step).item()  # the fraction, as float32 has it
    y = fake_quantise(x, name, rounding="stochastic", generator=torch.Generator().manual_seed(5))
    steps = (y.double() * sign - low) / step
    assert set(steps.tolist()) == {0.0, 1.0}
    assert abs(steps.mean().item() - share) < 4 * math.sqrt(share * (1 - share) / x.numel())
    # no pattern along the tensor either: neighbours are as independent as coins
    pairs = ((steps[1:] - share) * (steps[:-1] - share)).mean().item() / (share * (1 - share))
    assert abs(pairs) < 4 / math.sqrt(x.numel())


@pytest.mark.parametrize("name", SIGNED)
def test_stochastic_rounding_keeps_numbers_and_special_values(name: str) -> None:
    x = inputs(torch.float32)[::10]
    exact = cast(x, name)
    assert same(fake_quantise(exact, name, rounding="stochastic"), exact)
    for overflow in rules(name):
        special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
        expected = cast(special, name, overflow=overflow)
        assert same(fake_quantise(special, name, rounding="stochastic", overflow=overflow), expected)
    y = fake_quantise(x, name, rounding="stochastic")
    down, up = (cast(x.double(), name, rounding="toward_zero"), largest_number(name, torch.float32))
    inside = x.abs() <= up
    step = torch.where(
        down.abs() < FORMATS[name].min_normal, FORMATS[name].min_subnormal, 2 * x.abs() * FORMATS[name].eps
    )
    assert bool(((y.double() - x.double()).abs() <= step)[inside].all())


def test_a_seed_repeats_and_pieces_do_not_matter() -> None:
    x = torch.randn(200_003)
    first = fake_quantise(x, "e4m3fn", rounding="stochastic", generator=torch.Generator().manual_seed(7))
    again = fake_quantise(x.view(1, -1), "e4m3fn", rounding="stochastic", generator=torch.Generator().manual_seed(7))
    other = fake_quantise(x, "e4m3fn", rounding="stochastic", generator=torch.Generator().manual_seed(8))
    assert same(first, again[0])
    assert 0.2 < (first != other).float().mean() < 0.5


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
def test_special_values_in_every_position(value: float, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", mode)
    x = torch.ones(70, 70).fill_diagonal_(value)  # each position of a vector of any length, and of its remainder
    for overflow in rules("e4m3fn"):
        assert same(fake_quantise(x, "e4m3fn", overflow=overflow), cast(x, "e4m3fn", overflow=overflow))


def test_layouts_and_out() -> None:
    x = torch.randn(300, 400)
    expected = cast(x, "e4m3fn")
    for index in (..., (slice(None, None, 3), slice(1, None, 2)), slice(0, 0), (0, 0)):
        assert same(fake_quantise(x[index], "e4m3fn"), expected[index])
    assert same(fake_quantise(x.t(), "e4m3fn"), expected.t())
    strided = torch.empty(400, 300).t()
    assert fake_quantise(x, "e4m3fn", out=strided) is strided
    assert same(strided, expected)
    fake_quantise(x, "e4m3fn", out=x)
    assert same(x, expected)


def test_the_gradient_is_straight_through() -> None:
    x = torch.tensor([0.3, 1e6, -1e-9], requires_grad=True)
    fake_quantise(x, "e4m3fn").sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_encode_gives_the_references_codes(name: str, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    x = x[: x.numel() // 4 * 4]
    if not FORMATS[name].has_nan:
        x = x.nan_to_num(1.0)
    if FORMATS[name].bits != 8:
        x = x[::100][:400]
    got, expected = encode(x, name), codes.encode(x, name)
    assert got.dtype == expected.dtype
    if FORMATS[name].storage_bits <= 8:
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    else:
        assert same(got, expected)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"out": torch.empty(3)}, "e4m3fn"),
        ({"out": torch.empty(2).half()}, "e4m3fn"),
        ({}, "e4"),
        ({"rounding": "up"}, "e5m2"),
    ],
)
def test_bad_arguments_are_refused(options: dict, name: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError):
        fake_quantise(torch.ones(2), name, **options)
