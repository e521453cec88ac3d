"""Multipoint rows: what a point is, how error falls with points, and that a budget of bits is met to the bit."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from lpconv.formats.cast import cast
from lpconv.formats.spec import FORMATS
from lpconv.mcf.multipoint import PointFit, Points, decode, encode, fit
from lpconv.mcf.point_layout import MAX_COLS, point_layout

ELEMENTS = ["int4", "int8", "e4m3fn", "e2m1"]


def matrix(rows: int = 24, cols: int = 192, seed: int = 0) -> Tensor:
    """Rows of different sizes and shapes: Gaussian, heavy-tailed, one with an outlier, one constant, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.logspace(-4, 1, rows)[:, None]
    x[::3] = x[::3] ** 3
    x[1, 5] = 1000 * x[1].abs().max()
    x[2], x[4] = 0.37, 0.0
    return x


def with_points(x: Tensor, actual: PointFit, count: int, element: str) -> Tensor:
    """`x` with the same number of points in every row, through codes and back."""
    counts = torch.full((x.shape[0],), count, dtype=torch.uint8)
    points = Points(counts_R=counts, scales_P=actual.scales_RNN[:, count - 1, :count].reshape(-1))
    return decode(encode(x, points, FORMATS[element]), points, FORMATS[element])


@pytest.mark.parametrize("element", ELEMENTS)
def test_one_point_is_plain_rounding_at_its_scale(element: str) -> None:
    x = matrix()
    actual = fit(x, FORMATS[element], 3)
    scale = actual.scales_RNN[:, 0, :1]
    plain = cast(x / scale, element) * scale
    got = with_points(x, actual, 1, element)
    assert torch.equal(got.view(torch.int32), plain.view(torch.int32))


@pytest.mark.parametrize("element", ELEMENTS)
def test_error_falls_with_every_point_of_every_row(element: str) -> None:
    x = matrix()
    actual = fit(x, FORMATS[element], 4)
    assert (actual.errors_RN.diff(dim=1) <= 0).all()
    signal = x.double().square().sum(1)
    ordinary = actual.errors_RN[:, :-1] > 1e-11 * signal[:, None]  # above fp32's own noise
    ratio = actual.errors_RN[:, 1:] / actual.errors_RN[:, :-1]
    # a point leaves at most half a step of each element: far less than a hundredth of the energy for these formats
    assert (ratio[ordinary] < 0.05).all()
    for count in (1, 2, 3):
        got = (with_points(x, actual, count, element).double() - x.double()).square().sum(1)
        assert torch.allclose(got, actual.errors_RN[:, count - 1], rtol=1e-3, atol=1e-13 * float(signal.max()))


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_fitted_scale_is_never_worse_than_the_widest(element: str) -> None:
    x = matrix()
    scale = x.abs().amax(1, keepdim=True) / FORMATS[element].max
    scale[scale == 0] = 1
    widest = (cast(x / scale, element) * scale - x).double().square().sum(1)
    assert (fit(x, FORMATS[element], 1).errors_RN[:, 0] <= widest * (1 + 1e-5)).all()


def test_the_best_scale_is_found_where_it_is_known() -> None:
    """Rows of whole multiples of a step are exact with one point, though the widest scale does not fit their grid."""
    steps = torch.randint(-5, 6, (16, 64), generator=torch.Generator().manual_seed(3)).float()
    steps[:, 0] = 5.0
    x = steps * torch.logspace(-3, 3, 16)[:, None]
    actual = fit(x, FORMATS["int4"], 2)
    assert (actual.errors_RN[:, 0] <= 1e-12 * x.double().square().sum(1)).all()
    assert (actual.errors_RN[:, 1] <= actual.errors_RN[:, 0]).all()


def test_points_before_the_last_clip_nothing() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    int4 = FORMATS["int4"]
    actual = fit(x, int4, 2)
    first = Points(counts_R=torch.ones(64, dtype=torch.uint8), scales_P=actual.scales_RNN[:, 0, 0])
    clipped_rest = x - decode(encode(x, first, int4), first, int4)
    errors = [*actual.errors_RN.sum(0), fit(clipped_rest, int4, 1).errors_RN.sum()]
    one, two, two_with_a_clipped_first = (10 * math.log10(x.double().square().sum() / e) for e in errors)
    assert one > 19
    assert two > 41
    assert two_with_a_clipped_first < 34


def test_points_go_where_they_remove_most_error() -> None:
    actual = PointFit(
        scales_RNN=torch.ones(3, 3, 3),
        errors_RN=torch.tensor([[1.0, 0.9, 0.0], [5.0, 1.0, 0.5], [3.0, 2.0, 1.5]], dtype=torch.float64),
    )
    expected = {3: [1, 1, 1], 4: [1, 2, 1], 5: [1, 2, 2], 6: [1, 3, 2], 7: [1, 3, 3], 8: [2, 3, 3], 9: [3, 3, 3]}
    for count, counts in expected.items():
        assert actual.allot(count).counts_R.tolist() == counts, count


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 40).map(lambda n: 2 * n),
    element=st.sampled_from(ELEMENTS),
    budget=st.floats(4.1, 40.0),
    most=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_a_budget_is_met_to_the_bit(rows: int, cols: int, element: str, budget: float, most: int, seed: int) -> None:
    layout = point_layout((rows, cols), FORMATS[element], budget_bits=budget, points_max=most)
    one_more = cols * FORMATS[element].storage_bits + 32
    if layout is None:
        assert rows * (one_more + 8) > budget * rows * cols
        return
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    points = fit(x, FORMATS[element], most).allot(layout.num_points)
    coded = encode(x, points, FORMATS[element])
    stored = coded.numel() * 8 + points.scales_P.numel() * 32 + points.counts_R.numel() * 8
    assert stored == layout.num_bits <= budget * rows * cols
    assert layout.num_points == most * rows or stored + one_more > budget * rows * cols
    assert 1 <= points.counts_R.min() <= points.counts_R.max() <= most
    assert int(points.counts_R.sum()) == layout.num_points
    assert decode(coded, points, FORMATS[element]).shape == x.shape


def test_rows_that_no_layout_holds() -> None:
    int4 = FORMATS["int4"]
    assert point_layout((8, 63), int4, budget_bits=9, points_max=2) is None  # half a byte left over
    assert point_layout((8, 8), int4, budget_bits=8, points_max=2) is None  # 9 bits with the scale and the count
    assert point_layout((2, 2 * MAX_COLS), int4, budget_bits=9, points_max=2) is None
    stacked = point_layout((3, 8, 64), int4, budget_bits=9, points_max=2)
    assert stacked is not None
    assert (stacked.rows, stacked.cols) == (24, 64)


def test_blocks_of_rows_give_the_same_as_the_whole() -> None:
    x, element = matrix(), FORMATS["e2m1"]
    whole = fit(x, element, 3)
    parts = PointFit.concatenate([fit(x[:7], element, 3), fit(x[7:], element, 3)])
    assert torch.equal(whole.scales_RNN, parts.scales_RNN)
    assert torch.equal(whole.errors_RN, parts.errors_RN)
    points = whole.allot(40)
    coded = encode(x, points, element)
    first = int(points.counts_R[:7].sum())
    assert torch.equal(encode(x[7:], points.rows(7, 24), element), coded[first:])
    assert torch.equal(decode(coded[:first], points.rows(0, 7), element), decode(coded, points, element)[:7])


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 1e38])
def test_sizes_at_the_ends_of_fp32(size: float) -> None:
    x = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) * size
    points = fit(x, FORMATS["int8"], 2).allot(8)
    got = decode(encode(x, points, FORMATS["int8"]), points, FORMATS["int8"])
    assert points.scales_P.isfinite().all()
    assert math.isfinite(float((got.double() / size - x.double() / size).abs().max()))
    assert (got - x).abs().max() <= max(1e-2 * size, 2.0**-126)


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_largest_numbers_of_fp32_have_codes(element: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, 0.0, largest / 2]).repeat(2, 16)
    points = fit(x, FORMATS[element], 2).allot(4)
    got = decode(encode(x, points, FORMATS[element]), points, FORMATS[element])
    assert (got / largest - x / largest).abs().max() < 0.1
