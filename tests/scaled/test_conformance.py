"""The exact cases of jax-scalify's own tests, restated: (data, scale) in, scale and value out."""

import math

import pytest
import torch
from torch import Tensor

from lpconv.formats.codes import decode, encode
from lpconv.formats.scale import pow2_floor
from lpconv.kernels.operands import encode_operand
from lpconv.scaled import ScaledTensor, dynamic_rescale, scaled_tensor
from lpconv.scaled.operands import operand_cast
from lpconv.scaled.scales import split_number


def st(values: object, scale: float, dtype: torch.dtype = torch.float32) -> ScaledTensor:
    return scaled_tensor(torch.tensor(values, dtype=dtype), scale)


def values(x: Tensor) -> list[float]:
    return (x.dequantize() if isinstance(x, ScaledTensor) else x).tolist()


A, B = ([-1.0, 2.0], 4.0), ([1.5, 4.5], 2.0)


def test_add_and_sub_meet_at_the_larger_scale() -> None:
    for op, expected in ((torch.add, [-1.0, 17.0]), (torch.sub, [-7.0, -1.0])):
        out = op(st(*A), st(*B))
        assert (out.scale, values(out)) == (4.0, expected)


@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.minimum, torch.maximum])
def test_zeros_of_any_scale_stay_zero(op: object) -> None:
    out = op(st([0.0, 0.0], 0.0, torch.float16), st([0.0, 0.0], 0.0, torch.float16))
    assert (out.dtype, values(out)) == (torch.float16, [0.0, 0.0])


def test_mul_and_div() -> None:
    x, y = st([1.0, 3.0], 4.0), st([2.0, 4.0], 2.0)
    assert ((x * y).scale, values(x * y)) == (8.0, [16.0, 96.0])
    assert ((x / y).scale, values(x / y)) == (2.0, [1.0, 1.5])


def test_dot_moves_the_root_of_the_contraction_into_the_scale() -> None:
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    out = scaled_tensor(a, 2.0) @ scaled_tensor(b, 4.0)
    assert out.scale == 2 * 4 * 2
    torch.testing.assert_close(out.dequantize(), 8 * a @ b)


def test_reductions_of_five() -> None:
    x = st([1.0, -2.0, 3.0, 4.0, 5.0], 2.0)
    assert (x.sum().scale, float(x.sum())) == (4.0, 22.0)
    assert x.mean().scale == 2.0
    assert float(x.mean()) == pytest.approx(4.4)
    assert (x.max().scale, float(x.max()), float(x.min())) == (2.0, 10.0, -4.0)
    assert (x.prod().scale, float(x.prod())) == (32.0, -120.0 * 32)


@pytest.mark.parametrize("other", [st([0.0, 0.0], 0.0), torch.tensor([math.inf, -math.inf])])
def test_extremes_beside_zero_or_infinity_keep_the_scale(other: Tensor) -> None:
    assert torch.maximum(st(*A), other).scale == torch.minimum(st(*A), other).scale == 4.0


@pytest.mark.parametrize("op", [torch.exp, torch.log, torch.sin, torch.cos])
def test_functions_of_the_value_give_scale_one(op: object) -> None:
    assert op(st([1.0, 2.0], 2.0)).scale == 1.0


def test_is_finite_looks_at_data_and_scale() -> None:
    assert torch.isfinite(st([2.0, math.inf, math.nan], 2.0)).tolist() == [True, False, False]
    unknown = scaled_tensor(torch.tensor([3.0, 3.0]), torch.tensor(math.nan))
    assert torch.isfinite(unknown).tolist() == [False, False]
    assert torch.isnan(unknown).tolist() == [True, True]


def test_concatenate_and_select_take_the_largest_scale() -> None:
    assert torch.cat([st([1.0], 0.5), st([1.0], 2.0)]).scale == 2.0
    assert torch.cat([st([0.0], 0.0), st([0.0], 0.0)]).scale == 0.0
    assert torch.where(torch.tensor([True]), st([1.0], 2.0), st([1.0], 4.0)).scale == 4.0
    for scale in (0.25, 8.0):  # what relu's gradient does
        assert torch.where(torch.tensor([True]), st([1.0], scale), torch.tensor(0.0)).scale == scale


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.to(torch.float16),
        lambda x: x.reshape(4),
        lambda x: x[:1],
        lambda x: x.t(),
        lambda x: x.flip(0),
        lambda x: torch.nn.functional.pad(x, (1, 1)),
    ],
)
def test_layout_acts_on_the_data(op: object) -> None:
    plain = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = op(scaled_tensor(plain, 2.0))
    assert out.scale == 2.0
    assert torch.equal(out.data_part, op(plain))


@pytest.mark.parametrize(
    ("statistic", "data", "scale", "expected"),
    [("max", [2.0, -3.0], 4.0, 8.0), ("l1", [1.0, -6.0], 4.0, 8.0), ("l2", [4.0, -8.0], 4.0, 16.0)],
)
def test_dynamic_rescale(statistic: str, data: list[float], scale: float, expected: float) -> None:
    out = dynamic_rescale(st(data, scale, torch.float16), statistic)
    assert (float(out.scale), out.scale.dtype, out.dtype) == (expected, torch.float32, torch.float16)
    assert values(out) == [d * scale for d in data]


@pytest.mark.parametrize("statistic", ["max", "l1", "l2"])
def test_rescaling_zeros_lowers_the_scale_but_never_to_zero(statistic: str) -> None:
    x: Tensor = st([0.0, 0.0], 1.0)
    for _ in range(20):
        x = dynamic_rescale(x, statistic)
        assert 2.0**-126 <= float(x.scale) < 0.001
        assert values(x) == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("statistic", ["max", "l1", "l2"])
def test_rescaling_data_that_are_not_finite_keeps_scale_and_data(statistic: str, bad: float) -> None:
    x = st([1.0, bad], 2.0, torch.float16)
    out = dynamic_rescale(x, statistic)
    assert float(out.scale) == 2.0
    assert torch.equal(out.data_part.isfinite(), x.data_part.isfinite())


def test_the_gradient_of_a_mean_has_its_length_in_the_scale() -> None:
    x = scaled_tensor(torch.rand(8, 16), 1.0).requires_grad_()
    x.square().mean().backward(gradient=st(1.0, 1.0))
    assert x.grad.scale == 2 / 128  # the 2 of x² goes to the scale too; jax-scalify leaves it in the data
    assert 0.25 <= float(x.grad.data_part.std()) <= 1


def test_casts_to_fp8_round_to_nearest_even_and_saturate() -> None:
    vector = torch.tensor([17.0, -17.0, 8.0, 1.0, 9.0, 11.0, 18.0, 1e6])
    assert encode_operand(vector, operand_cast("e4m3fn", "static")).codes.float().tolist() == [
        16,
        -16,
        8,
        1,
        9,
        11,
        18,
        448,
    ]
    assert encode_operand(vector, operand_cast("e5m2", "static")).codes.float().tolist() == [
        16,
        -16,
        8,
        1,
        8,
        12,
        16,
        57344,
    ]


@pytest.mark.parametrize(
    ("number", "mantissa", "scale"),
    [
        (5.0, 1.25, 4.0),
        (2.1, 1.05, 2.0),
        (0.51, 1.02, 0.5),
        (65504.0, 1.9990234375, 32768.0),
        (0.0, 0.0, 0.0),
        (-3.0, -1.5, 2.0),
    ],
)
def test_numbers_split_into_mantissa_and_power_of_two(number: float, mantissa: float, scale: float) -> None:
    assert split_number(number) == (mantissa, scale)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_keep_the_scale_one(special: float) -> None:
    mantissa, scale = split_number(special)  # the reference gives them an infinite scale
    assert scale == 1.0
    assert mantissa == special or math.isnan(mantissa)


def test_scales_floored_to_powers_of_two_are_e8m0_codes() -> None:
    numbers = torch.tensor([0.6, 2.0, 1.0, 9.0, 15.0, 127.0])
    codes = encode(pow2_floor(numbers), "e8m0fnu").view(torch.uint8)
    assert codes.tolist() == [126, 128, 127, 130, 130, 133]
    powers = torch.tensor([2.0**-126, 0.25, 1.0, 2.0, 8.0, 2.0**127])  # 2^-127 is below the smallest scale here
    assert torch.equal(decode(encode(powers, "e8m0fnu"), "e8m0fnu"), powers)
