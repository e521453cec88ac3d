"""Splitting fp32 into a 16-bit number and a residual: bounds over every mantissa, specials, buffers, dtypes."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from lpconv.errors import UsageError
from lpconv.mcf.split import BF16, EXACT16, FP16, FP16_RESIDUAL_SCALE, RESIDUALS, SCRATCH_ELEMENTS, Residual

ALL = pytest.mark.parametrize("residual", RESIDUALS.values(), ids=RESIDUALS)
# Subnormal, smallest normal, around the absolute bf16 bound, fp16's smallest normal, 1, fp16's largest, largest.
EXPONENT_FIELDS = (0, 1, 9, 113, 127, 142, 254)


def every_mantissa(exponent_field: int) -> Tensor:
    """The 2^23 positive fp32 numbers with this exponent field."""
    return (torch.arange(2**23, dtype=torch.int32) | (exponent_field << 23)).view(torch.float32)


def from_bits(*patterns: int) -> Tensor:
    return torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))


def bits(x: Tensor) -> list[int]:
    return [int(b) for b in x.contiguous().numpy().view(np.uint32)]


@ALL
@pytest.mark.parametrize("exponent_field", EXPONENT_FIELDS)
def test_every_mantissa_stays_in_the_stated_bound(residual: Residual, exponent_field: int) -> None:
    x = every_mantissa(exponent_field)
    hi, rest = residual.split(x)
    back = residual.merge(hi, rest)

    assert (hi.dtype, rest.dtype, back.dtype) == (residual.hi_dtype, residual.dtype, torch.float32)
    error = (x.double() - back.double()).abs()
    bound = (residual.relative_bound * x.double()).clamp(min=residual.absolute_bound)
    finite = hi.isfinite()
    assert bool((error <= bound)[finite].all())
    if exponent_field < 142:
        assert bool(finite.all())


@pytest.mark.parametrize(
    ("name", "exponent_field"), [("bf16", 127), ("bf16", 1), ("int8", 127), ("int8", 1), ("fp16", 127), ("fp16", 113)]
)
def test_bounds_are_not_slack(name: str, exponent_field: int) -> None:
    """The worst error is at least 95 % of the stated bound, so that a printed bound says something."""
    residual = RESIDUALS[name]
    x = every_mantissa(exponent_field)
    error = (x.double() - residual.merge(*residual.split(x)).double()).abs()
    bound = (residual.relative_bound * x.double()).clamp(min=residual.absolute_bound)
    assert float((error / bound).max()) >= 0.95


@ALL
@pytest.mark.parametrize("exponent_field", [0, 127])
def test_negative_numbers_mirror_positive_ones(residual: Residual, exponent_field: int) -> None:
    x = every_mantissa(exponent_field)
    assert torch.equal(
        residual.merge(*residual.split(-x)).view(torch.int32), (-residual.merge(*residual.split(x))).view(torch.int32)
    )


@ALL
@pytest.mark.parametrize("exponent_field", EXPONENT_FIELDS)
def test_splitting_a_merged_pair_gives_the_pair_back(residual: Residual, exponent_field: int) -> None:
    hi, rest = residual.split(every_mantissa(exponent_field))
    again_hi, again_rest = residual.split(residual.merge(hi, rest))
    assert torch.equal(hi.view(torch.int16), again_hi.view(torch.int16))
    assert torch.equal(rest, again_rest)


def test_bf16_pair_differs_from_plain_rounding_only_by_the_tie() -> None:
    x = every_mantissa(127)
    hi, lo = BF16.split(x)
    moved = hi != x.bfloat16()
    assert 0.0005 < float(moved.double().mean()) < 0.002
    assert bool(((hi.double() - x.bfloat16().double()).abs()[moved] == 2.0**-7).all()), "one ulp, to the even neighbour"
    assert torch.equal((hi.float() + lo.float()).bfloat16(), hi)


def test_exact16_hi_is_nearest_with_ties_away() -> None:
    x = every_mantissa(127)
    hi, residual = EXACT16.split(x)
    distance = (x.double() - hi.double()).abs()
    assert float(distance.max()) == 2.0**-8
    ties = distance == 2.0**-8
    assert bool((hi.double() > x.double())[ties].all())
    assert (int(residual.min()), int(residual.max())) == (-32768, 32767)


def test_fp16_residual_is_scaled() -> None:
    hi, lo = FP16.split(torch.tensor([0.02]))
    exact = (torch.tensor([0.02]).double() - hi.double()) * FP16_RESIDUAL_SCALE
    assert float(lo) == float(exact.half())
    assert 2.0**-14 < abs(float(lo)) < 0.02


@ALL
def test_zeros_keep_their_sign_and_infinities_stay(residual: Residual) -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
    hi, rest = residual.split(x)
    assert not bool(rest.any())
    assert bits(hi.float()) == bits(x)
    assert bits(residual.merge(hi, rest)) == bits(x)


@ALL
def test_nan_stays_nan_in_hi_and_merge(residual: Residual) -> None:
    x = from_bits(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC08000, 0x7FBFFFFF)
    hi, rest = residual.split(x)
    assert bool(hi.isnan().all())
    assert bool(residual.merge(hi, rest).isnan().all())


def test_exact16_gives_quiet_nans_back_bit_for_bit_and_quietens_the_others() -> None:
    patterns = [0x7FC00000, 0x7FC12345, 0x7FFFFFFF, 0xFFC08000, 0xFFFFFFFF, 0x7F800001, 0x7F808000, 0xFFBFFFFF]
    back = bits(EXACT16.merge(*EXACT16.split(from_bits(*patterns))))
    assert back == [p | 0x00400000 for p in patterns]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_exact16_is_exact_for_any_bit_pattern(patterns: list[int]) -> None:
    x = from_bits(*patterns)
    back = bits(EXACT16.merge(*EXACT16.split(x)))
    for pattern, value, actual in zip(patterns, x, back, strict=True):
        assert actual == (pattern | 0x00400000 if value.isnan() else pattern)


@pytest.mark.parametrize(
    ("name", "first_infinite"),
    [("bf16", 0x7F7F7FC0), ("int8", 0x7F7FFF80), ("fp16", 0x477FEFFF), ("exact16", 0x7F800000)],
)
def test_overflow_starts_where_stated_and_leaves_no_nan(name: str, first_infinite: int) -> None:
    residual = RESIDUALS[name]
    below, above = from_bits(first_infinite - 1), from_bits(first_infinite)
    assert bool(residual.merge(*residual.split(below)).isfinite().all())
    hi, rest = residual.split(above)
    assert bool(hi.isinf().all())
    assert not bool(rest.any())
    assert bool(residual.merge(hi, rest).isinf().all())


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_narrow_sources_convert_exactly_first(residual: Residual, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 1001).to(dtype)
    hi, rest = residual.split(x)
    assert torch.equal(residual.merge(hi, rest), x.float())
    if dtype in (residual.hi_dtype, torch.float8_e4m3fn):
        assert not bool(rest.any()), "these fit hi entirely"


@ALL
def test_fp64_is_rounded_to_fp32_first(residual: Residual) -> None:
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    from64, from32 = residual.split(x), residual.split(x.float())
    assert torch.equal(from64[0], from32[0])
    assert torch.equal(from64[1], from32[1])


@ALL
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (2**17 + 3,)])
def test_shapes_buffers_and_strides(residual: Residual, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = residual.split(x)
    out = (torch.empty(shape, dtype=residual.hi_dtype), torch.empty(shape, dtype=residual.dtype))
    scratch, merged = torch.empty(SCRATCH_ELEMENTS), torch.empty(shape)

    actual = residual.split(x, out=out, scratch=scratch)
    assert actual[0] is out[0]
    assert actual[1] is out[1]
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert residual.merge(*actual, out=merged, scratch=scratch) is merged
    assert torch.equal(merged, residual.merge(*expected))
    if x.dim() == 2:
        strided = torch.randn(shape[1], shape[0]).t()
        assert torch.equal(residual.split(strided)[0], residual.split(strided.contiguous())[0])


def test_wrong_buffers_and_dtypes_are_refused_with_a_hint() -> None:
    x = torch.randn(4)
    bf16, int16 = torch.empty(4, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int16)
    for call in (
        lambda: BF16.split(torch.arange(4)),
        lambda: BF16.split(x, out=(bf16, int16)),
        lambda: BF16.split(x, out=(bf16, torch.empty(5, dtype=torch.bfloat16))),
        lambda: BF16.split(x, out=(bf16, torch.empty(8, dtype=torch.bfloat16)[::2])),
        lambda: BF16.split(x, scratch=torch.empty(10)),
        lambda: BF16.merge(bf16, int16),
        lambda: EXACT16.merge(bf16, torch.empty(3, dtype=torch.int16)),
        lambda: EXACT16.merge(bf16, int16, out=torch.empty(4, dtype=torch.float64)),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.hint
