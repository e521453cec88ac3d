"""Powers of two are exact, and statistics are those of a tensor, its rows or its blocks."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lpconv.errors import UsageError
from lpconv.formats.scale import amax, normal_pow2_ceil, normal_pow2_floor, pow2_ceil, pow2_floor, pow2_nearest, rms

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDERS = [pow2_floor, pow2_ceil, pow2_nearest]


@pytest.mark.parametrize(
    ("x", "floor", "ceil", "nearest"),
    [
        (1.0, 1.0, 1.0, 1.0), (2.1, 2.0, 4.0, 2.0), (0.3, 0.25, 0.5, 0.25), (0.51, 0.5, 1.0, 0.5),
        (65500.0, 32768.0, 65536.0, 65536.0), (17000.0, 16384.0, 32768.0, 16384.0), (-3.0, 2.0, 4.0, 4.0),
        (0.0, 0.0, 0.0, 0.0), (1e-300, 2.0**-126, 2.0**-126, 2.0**-126), (1e300, 2.0**127, 2.0**127, 2.0**127),
        (5e-324, 2.0**-126, 2.0**-126, 2.0**-126), (math.inf, math.inf, math.inf, math.inf),
        (math.sqrt(2), 1.0, 2.0, 2.0), (math.nextafter(math.sqrt(2), 0), 1.0, 2.0, 1.0),
        (math.nextafter(1.0, 2), 1.0, 2.0, 1.0),
    ],
)  # fmt: skip
def test_floor_ceil_and_nearest(x: float, floor: float, ceil: float, nearest: float) -> None:
    for rounder, expected in zip(ROUNDERS, (floor, ceil, nearest), strict=True):
        assert rounder(x) == expected
        assert rounder(torch.tensor(x, dtype=torch.float64)).item() == expected


@pytest.mark.parametrize("rounder", ROUNDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_keep_dtype_and_range(rounder, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    info = torch.finfo(dtype)
    x = torch.tensor([info.max, info.smallest_normal, 0.0, math.inf, math.nan], dtype=dtype)
    y = rounder(x)
    assert y.dtype == dtype
    assert y[:2].isfinite().all()
    assert y[2] == 0
    assert y[3] == math.inf
    assert y[4].isnan()
    assert math.isnan(rounder(math.nan))


def test_float16_subnormals_are_exact() -> None:
    assert pow2_floor(torch.tensor(3.1233e-5, dtype=torch.float16)).item() == 2.0**-15
    assert pow2_ceil(torch.tensor(65504, dtype=torch.float16)).item() == 2.0**15  # 2^16 is Inf in float16


@settings(deadline=None)
@given(st.floats(min_value=2.0**-126, max_value=2.0**127))
def test_laws_of_powers_of_two(x: float) -> None:
    low, high, near = pow2_floor(x), pow2_ceil(x), pow2_nearest(x)
    assert all(math.frexp(p)[0] == 0.5 for p in (low, high, near))
    assert low <= x <= high
    assert high in (low, 2 * low)
    assert near in (low, high)
    assert 0.7071 < x / near < 1.4143


def test_arrays_of_normal_numbers_have_the_same_powers() -> None:
    """Every exponent, with the least, the next, a middle and the largest significand."""
    exponents = torch.arange(1, 254, dtype=torch.int32) << 23
    bits = (exponents.unsqueeze(1) + torch.tensor([0, 1, 2**22, 2**23 - 1], dtype=torch.int32)).flatten()
    x = torch.cat([bits.view(torch.float32), torch.tensor([2.0**127])])
    assert torch.equal(torch.from_numpy(normal_pow2_ceil(x.numpy())), pow2_ceil(x))
    assert torch.equal(torch.from_numpy(normal_pow2_floor(x.double().numpy())), pow2_floor(x.double()))


def test_statistics_per_tensor_row_and_block() -> None:
    x = torch.tensor([[1.0, -5.0, 0.0, 2.0], [0.5, 0.25, -8.0, 4.0]])
    assert amax(x).item() == 8
    assert amax(x, (1, -1)).tolist() == [[5.0], [8.0]]
    assert amax(x, (1, 2)).tolist() == [[5.0, 2.0], [0.5, 8.0]]
    assert amax(x, (2, 2)).tolist() == [[5.0, 8.0]]
    assert rms(x, (2, -1)).item() == pytest.approx(x.double().pow(2).mean().sqrt().item(), rel=1e-15)
    assert rms(torch.full((4,), 1e30)).item() == pytest.approx(1e30)  # x² overflows float32
    assert amax(torch.tensor([1.0, math.nan])).isnan()
    assert amax(torch.empty(0, 4)).item() == rms(torch.empty(0, 4)).item() == 0


@pytest.mark.parametrize("call", [lambda x: amax(x, (1, 3)), lambda x: amax(x, (1, 0)), lambda x: rms(x, (4,))])
def test_bad_arguments_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        call(torch.ones(4, 8))
