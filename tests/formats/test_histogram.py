"""Rates from a histogram are those counted on the tensor itself, for every format and any power of two."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.cast import cast
from lpconv.formats.histogram import BINS, ExponentHistogram, exponent_histogram_reference
from lpconv.formats.spec import FORMATS, Format

RESOLVED = [n for n, f in FORMATS.items() if f.has_sign and f.mantissa_bits <= 10]


def counted(x: Tensor, spec: Format, log2_scale: int) -> tuple[int, int, int]:
    """Underflow, subnormal and overflow by casting every element, with no upper limit to see overflow by."""
    x = x.double()[x.isfinite() & (x != 0)] * 2.0**log2_scale
    y = cast(x, spec).abs()
    unlimited = dataclasses.replace(spec, max_exponent_field=1023 + spec.bias, max_mantissa=0)
    overflow = cast(x, unlimited).abs() > spec.max
    return int((y == 0).sum()), int(((y > 0) & (y < spec.min_normal)).sum()), int(overflow.sum())


def edges() -> Tensor:
    """Every tie that decides something in any format, with its neighbours in float32, at many powers of two."""
    significands = torch.cat([torch.arange(16, 32) / 16, 2 - 2.0 ** -torch.arange(5.0, 12.0)])
    x = torch.cat([significands * 2.0**e for e in range(-30, 31)])
    return torch.cat(
        [x, torch.nextafter(x, x * 2), torch.nextafter(x, x * 0), torch.zeros(3), torch.tensor([math.inf])]
    )


@pytest.mark.parametrize("name", RESOLVED)
@pytest.mark.parametrize("log2_scale", [0, 7, -3, 120, -110])
def test_rates_are_those_counted_directly(name: str, log2_scale: int) -> None:
    random = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.linspace(-40, 20, 5000)
    for x in (edges(), random, random.bfloat16(), random.half(), random.double()):
        h = exponent_histogram_reference(x)
        got = tuple(f(name, log2_scale=log2_scale) for f in (h.num_underflow, h.num_subnormal, h.num_overflow))
        assert got == counted(x, FORMATS[name], log2_scale)


@settings(deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50),
    st.sampled_from(RESOLVED),
    st.integers(-20, 20),
)
def test_rates_of_any_floats(values: list[float], name: str, log2_scale: int) -> None:
    x = torch.tensor(values)
    h = exponent_histogram_reference(x)
    rates = h.rates(name, log2_scale=log2_scale)
    total = max(int((x != 0).sum()), 1)
    expected = [n / total for n in counted(x, FORMATS[name], log2_scale)]
    assert [rates.underflow, rates.subnormal, rates.overflow] == expected


@pytest.mark.parametrize(
    ("name", "scale"),
    [("e4m3fn", 1.0), ("e5m2", 0.01), ("fp16", 1e-7), ("e4m3fn", 300.0), ("e2m1", 2.0), ("fp16", 1.0), ("bf16", 1.0)],
)
def test_the_sqnr_estimate_is_within_half_a_decibel(name: str, scale: float) -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).double() * scale
    error = cast(x, name) - x
    exact = 10 * math.log10(x.square().sum().item() / error.square().sum().item())
    assert exponent_histogram_reference(x.float()).sqnr_db(name) == pytest.approx(exact, abs=0.5)


def test_the_crest_is_the_largest_magnitude_over_the_root_mean_square() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096)
    x[7], x[:2048:2] = -400.0, 0.0
    actual = exponent_histogram_reference(x)
    rms = float(x.double().square().mean().sqrt())
    assert actual.crest == pytest.approx(400 / rms, rel=0.05)
    assert actual.log2_rms == math.floor(math.log2(rms))
    empty = exponent_histogram_reference(torch.zeros(3))
    assert math.isnan(empty.crest)
    assert empty.log2_rms == 0


def test_the_sqnr_without_error_is_infinite_and_without_signal_unknown() -> None:
    assert exponent_histogram_reference(torch.tensor([1.0, -2.0, 0.75])).sqnr_db("e4m3fn") == math.inf
    assert math.isnan(exponent_histogram_reference(torch.zeros(3)).sqnr_db("e4m3fn"))


def test_special_values_are_apart() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.0, 1e-45])
    h = exponent_histogram_reference(x)
    assert (h.num_zero, h.num_inf, h.num_nan, h.num_nonzero, h.num_elements) == (2, 2, 1, 2, 7)
    assert h.exponents == {-149: 1, 1: 1}
    empty = exponent_histogram_reference(torch.empty(0))
    assert empty.num_elements == 0
    assert empty.rates("fp16").overflow == 0


def test_histograms_add_up_and_travel_as_json() -> None:
    a, b = torch.randn(100), torch.randn(100) * 1e-6
    together = exponent_histogram_reference(torch.cat([a, b]))
    total = exponent_histogram_reference(a) + exponent_histogram_reference(b)
    assert total.first_exponent == together.first_exponent
    assert torch.equal(total.counts, together.counts)
    back = ExponentHistogram.from_dict(json.loads(json.dumps(total.to_dict())))
    assert torch.equal(back.counts, total.counts)
    assert (back.first_exponent, back.num_elements) == (total.first_exponent, 200)
    nothing = ExponentHistogram(counts=torch.zeros(0, BINS, dtype=torch.int64), first_exponent=0)
    assert torch.equal((total + nothing).counts, total.counts)
    assert (nothing + nothing).num_elements == 0


def test_what_it_cannot_answer_is_refused() -> None:
    h = exponent_histogram_reference(torch.ones(2))
    for name in ("fp32", "e8m0fnu"):
        with pytest.raises(UnsupportedError):
            h.rates(name)
    with pytest.raises(UsageError):
        h.rates("e4m3fm")


@pytest.mark.parametrize(
    "counts",
    [{"a": {}}, {"1": {"99": 1}}, {"1": {"-1": 1}}, {"1": {"0": math.inf}}, {"1": {"0": 1.5}}, {"1": {"0": -1}},
     {"1": {"0": 10**30}}, {"1000000000": {"0": 1}}, [], {"1": [1]}],
    ids=str,
)  # fmt: skip
def test_a_record_that_is_none_is_refused(counts: object) -> None:
    with pytest.raises(UsageError, match="histogram"):
        ExponentHistogram.from_dict({"counts": counts, "zero": 0, "inf": 0, "nan": 0})
    with pytest.raises(UsageError, match="record"):
        ExponentHistogram.from_dict({"counts": {}})
