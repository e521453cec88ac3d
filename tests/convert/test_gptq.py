"""Rounding with error feedback, as a function of a weight, the second moment of its inputs, scales and a format."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lpconv.convert.gptq import AIM, DAMPING, Factor, Moment, round_to_nearest, round_with_feedback
from lpconv.formats.spec import FORMATS, INTEGERS, Format

NAMES = (*INTEGERS, "e2m1", "e4m3fn", "e5m2")
ROWS, COLS = 12, 150  # columns beyond two blocks


def _layer(element: Format, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, Σ x xᵀ of correlated inputs, and a scale for every group of ten columns."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(COLS, COLS, generator=generator)
    x = torch.randn(400, COLS, generator=generator) @ mixing
    weight = torch.randn(ROWS, COLS, generator=generator)
    scales = weight.view(ROWS, -1, 10).abs().amax(-1) / element.max
    return weight, x.T @ x, scales.repeat_interleave(10, 1)


def _feedback(weight: Tensor, hessian: Tensor, scales: Tensor, element: Format) -> Tensor:
    return round_with_feedback(weight, factor_of(hessian), scales, element)


def factor_of(hessian: Tensor) -> Factor:
    return Moment(hessian_CC=hessian.clone()).factor()


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """The share of the squared output that changes."""
    factor = factor_of(hessian)
    return factor.squared_outputs(weight - rounded) / factor.squared_outputs(weight)


def _textbook(weight: Tensor, hessian: Tensor, scales: Tensor, element: Format) -> Tensor:
    """Optimal Brain Quantisation in one order for all rows, as the paper derives it: the inverse is taken anew for the
    columns that are left, all in fp64."""
    weight, hessian = weight.double(), hessian.double()
    hessian = hessian + torch.eye(COLS, dtype=torch.float64) * DAMPING * hessian.diagonal().mean()
    left = torch.argsort(hessian.diagonal(), descending=True).tolist()
    rounded = torch.zeros_like(weight)
    while left:
        c = left[0]
        inverse = torch.linalg.inv(hessian[left][:, left])
        rounded[:, c] = round_to_nearest(weight[:, [c]].float(), scales[:, [c]], element)[:, 0]
        weight[:, left] -= torch.outer((weight[:, c] - rounded[:, c]) / inverse[0, 0], inverse[0])
        left = left[1:]
    return rounded.float()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_round_as_the_textbook_loop_does(name: str) -> None:
    element = FORMATS[name]
    weight, hessian, scales = _layer(element)
    assert torch.equal(_feedback(weight, hessian, scales, element), _textbook(weight, hessian, scales, element))


def test_output_error_is_the_share_of_the_output_that_changes() -> None:
    weight, hessian, scales = _layer(FORMATS["int4"])
    x = torch.linalg.cholesky(hessian.double())
    rounded = round_to_nearest(weight, scales, FORMATS["int4"])
    wanted = ((weight - rounded).double() @ x).square().sum() / (weight.double() @ x).square().sum()
    assert output_error(weight, rounded, hessian) == pytest.approx(float(wanted), rel=1e-4)


def test_the_weight_is_aimed_at_the_source_by_damped_least_squares() -> None:
    """Codes are those of W* without an aim, which minimises ‖W x̃ - W* x‖² + damping · ‖W* - W‖² for a full step."""
    generator = torch.Generator().manual_seed(0)
    source_x = torch.randn(400, COLS, generator=generator) @ torch.randn(COLS, COLS, generator=generator)
    x = source_x + torch.randn(400, COLS, generator=generator)
    weight, moment = torch.randn(ROWS, COLS, generator=generator), Moment.zero(COLS)
    for part in (slice(0, 100), slice(100, 400)):
        moment.add(x[part], source_x[part])
    wide = x.double().T @ x.double()
    damped = torch.eye(COLS, dtype=torch.float64) * DAMPING * wide.diagonal().mean()
    target = weight.double() @ (source_x.double().T @ x.double() + damped)
    aimed = weight.lerp((target @ torch.linalg.inv(wide + damped)).float(), AIM)
    scales = torch.full_like(weight, 0.1)
    found = round_with_feedback(weight, moment.factor(), scales, FORMATS["int8"])
    wanted = _textbook(aimed, x.T @ x, scales, FORMATS["int8"])
    assert (found != wanted).float().mean() < 0.02
    assert (found != _textbook(weight, x.T @ x, scales, FORMATS["int8"])).float().mean() > 0.3


@pytest.mark.parametrize("cols", [1023, 1024, 2100])
def test_a_factor_of_large_moments_is_that_of_the_whole_matrix(cols: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, cols, generator=generator) * torch.rand(cols, generator=generator)
    moment = Moment.zero(cols)
    for part in x.split(40):
        moment.add(part.view(1, len(part), cols))
    factor = moment.factor()
    hessian = (x.double().T @ x.double())[factor.order][:, factor.order]
    wanted = hessian + torch.eye(cols, dtype=torch.float64) * DAMPING * hessian.diagonal().mean()
    lower = factor.lower_CC.double()
    torch.testing.assert_close(lower @ lower.T, wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(lower.tril(), lower)
    assert factor.num_inputs == 64


def test_moments_of_too_small_a_determinant_for_fp32_are_factored_in_fp64() -> None:
    hessian = torch.tensor([[1.0, 1.01], [1.01, 1.0]])  # 1.01 in fp32 is a little less than 1 + DAMPING
    with pytest.raises(ArithmeticError):
        factor_of(hessian)
    lower = Moment(hessian_CC=hessian.clone()).factor(torch.float64).lower_CC
    wanted = np.linalg.cholesky(hessian.double().numpy() + np.eye(2) * float(torch.tensor(DAMPING)))
    np.testing.assert_allclose(lower.numpy(), wanted, rtol=1e-6)


def test_uncorrelated_inputs_leave_nearest_rounding() -> None:
    weight, hessian, scales = _layer(FORMATS["int4"])
    found = _feedback(weight, torch.diag(hessian.diagonal()), scales, FORMATS["int4"])
    assert torch.equal(found, round_to_nearest(weight, scales, FORMATS["int4"]))


def test_columns_that_no_input_reaches_are_rounded_to_nearest() -> None:
    weight, hessian, scales = _layer(FORMATS["int4"])
    hessian[:, 7], hessian[7] = 0.0, 0.0
    found = _feedback(weight, hessian, scales, FORMATS["int4"])
    assert torch.equal(found[:, 7], round_to_nearest(weight, scales, FORMATS["int4"])[:, 7])
    assert torch.isfinite(_feedback(weight, torch.zeros_like(hessian), scales, FORMATS["int4"])).all()


def test_fewer_inputs_than_columns_are_enough() -> None:
    weight, _, scales = _layer(FORMATS["e2m1"])
    x = torch.randn(3, COLS, generator=torch.Generator().manual_seed(1))
    nearest = round_to_nearest(weight, scales, FORMATS["e2m1"])
    found = _feedback(weight, x.T @ x, scales, FORMATS["e2m1"])
    assert output_error(weight, found, x.T @ x) < 0.1 * output_error(weight, nearest, x.T @ x)


def test_a_weight_on_the_grid_stays_as_it_is() -> None:
    weight, hessian, scales = _layer(FORMATS["int4"])
    weight = round_to_nearest(weight, scales, FORMATS["int4"])
    assert torch.equal(_feedback(weight, hessian, scales, FORMATS["int4"]), weight)


def test_rows_are_rounded_alone_and_the_weight_left_alone() -> None:
    element = FORMATS["int4"]
    weight, hessian, scales = _layer(element)
    before = weight.clone()
    found = _feedback(weight, hessian, scales, element)
    assert torch.equal(found[3:5], _feedback(weight[3:5], hessian, scales[3:5], element))
    assert torch.equal(weight, before)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_an_error(wrong: float) -> None:
    _, hessian, _ = _layer(FORMATS["int4"])
    hessian[3, 3] = wrong
    with pytest.raises(ValueError, match="NaN, infinite"):
        factor_of(hessian)
