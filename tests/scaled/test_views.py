"""Writes in place reach all views of the memory, as in plain PyTorch, and gradients come back through them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError
from lpconv.scaled import fallbacks, scaled, scaled_tensor
from lpconv.scaled.pair import Role


def _column(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 0] = h[:, 0]
    return out


def _columns_of_other_sizes(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for i in range(h.shape[1]):
        out[:, i] = h[:, i] * 10.0**i
    return out


def _view_before_the_write(h: Tensor) -> Tensor:
    out = h * 3
    row, seen = out[1], out.t()
    row.mul_(1000)
    return out.sum(0) + seen.sum(1)


def _write_to_the_base(h: Tensor) -> Tensor:
    out = h * 3
    row = out[0]
    out[:, 1:3] = 7
    return row * 2 + out.mean(0)


def _views_of_views(h: Tensor) -> Tensor:
    out = h.clone()
    out.view(2, 2, 4)[1].t()[0].add_(h[0, :2] * 5)
    left, right = out[:, :2], out[:, 2:]
    left.copy_(right * 100)
    return out


def _diagonal(h: Tensor) -> Tensor:
    out = h.clone()
    out.diagonal().fill_(0.5)
    return out


def _by_mask(h: Tensor) -> Tensor:
    out = h.clone()
    out[:, 1:][h[:, 1:] > 0] = 2
    return out


def _shared_by_a_product(h: Tensor) -> Tensor:
    """A product with a power of two may share the data of its operand; a write to one must not reach the other."""
    out = h.clone()
    doubled = out * 2
    out[0] = 0
    return out + doubled


def _in_place_functions(h: Tensor) -> Tensor:
    out = (h * 2).add_(h).sub_(0.25)
    out[1:].neg_().div_(3).clamp_(max=0.2)
    return (out / 4).tanh_()


def _reshaped_in_place(h: Tensor) -> Tensor:
    out = (h * 3).unsqueeze_(0).squeeze_(0).t_()
    out[1:] = 5
    row = out[1:2].unsqueeze_(0)
    return out + row.squeeze_(0)


def _plain_target(h: Tensor) -> Tensor:
    out = torch.zeros(h.shape)
    out[1] = h[1]
    return out * h


WRITES = [
    _column,
    _columns_of_other_sizes,
    _view_before_the_write,
    _write_to_the_base,
    _views_of_views,
    _diagonal,
    _by_mask,
    _shared_by_a_product,
    _in_place_functions,
    _reshaped_in_place,
    _plain_target,
]


class Writing(nn.Module):
    """Two linear layers with a write in place between them."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write, self.first, self.last = write, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["unit", "scalify"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_place_reaches_all_views_and_gradients_come_back(
    write: Callable[[Tensor], Tensor], method: str
) -> None:
    torch.manual_seed(0)
    plain = Writing(write)
    ours = scaled(copy.deepcopy(plain), method=method)
    x, target = torch.randn(4, 4), torch.randn(4, 4)

    losses = [torch.nn.functional.mse_loss(model(x).expand(4, 4), target) for model in (plain, ours)]
    for loss in losses:
        loss.backward()

    assert torch.equal(*losses)
    for name, parameter in plain.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad.dequantize(), parameter.grad), name


ZEROING: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda h: h.clone().index_put_((torch.tensor([True, False, False, False]),), torch.tensor(0.0)),
    "rows": lambda h: h.clone().index_put_((torch.tensor([0]),), torch.zeros(4)),
    "scatter": lambda h: h.scatter(0, torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4)),
}


@pytest.mark.parametrize("method", ["unit", "scalify"])
@pytest.mark.parametrize("name", ZEROING)
def test_small_gradients_keep_their_bits_in_fp16_where_plain_zeros_were_written(name: str, method: str) -> None:
    torch.manual_seed(0)
    plain = Writing(ZEROING[name])
    ours = scaled(copy.deepcopy(plain), method=method, compute="fp16")
    for model in (plain, ours):
        (model(torch.ones(4, 4)).float() * 1e-7).sum().backward()

    expected = plain.first.weight.grad
    assert float((ours.first.weight.grad.dequantize() - expected).norm()) < 2.0**-9 * float(expected.norm())


def test_writes_have_rules() -> None:
    ours = scaled(Writing(_views_of_views), strict=True)
    ours(torch.randn(4, 4)).sum().backward()
    assert fallbacks(ours) == {}


def test_a_write_to_all_of_a_view_takes_the_scale_of_what_is_written() -> None:
    base = scaled_tensor(torch.ones(2, 3, dtype=torch.float16), 1.0, role=Role.GRADIENT)
    base.t().mul_(2.0**-30)
    assert torch.equal(base.dequantize(), torch.full((2, 3), 2.0**-30))


@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.WEIGHT])
def test_the_reciprocal_of_fresh_zeros_is_infinite(role: Role) -> None:
    zeros = torch.zeros_like(scaled_tensor(torch.randn(2, 3), 4.0, role=role))
    assert torch.equal(zeros.reciprocal().dequantize(), torch.full((2, 3), torch.inf))


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "product with 2": lambda x: x * 2 / 2,
    "quotient by 1": lambda x: x / 1,
    "copy into an activation": lambda x: scaled_tensor(torch.ones(2, 3), 1.0).copy_(x),
    "copy into zeros": lambda x: torch.zeros_like(x).copy_(x),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("role", [Role.WEIGHT, Role.EXACT])
def test_a_result_keeps_its_value_when_its_parameter_is_updated(name: str, role: Role) -> None:
    parameter = scaled_tensor(torch.ones(2, 3), 4.0, role=role)
    out = COPIES[name](parameter)
    parameter.add_(1)
    assert torch.equal(out.dequantize(), torch.full((2, 3), 4.0))


@pytest.mark.parametrize("role", Role)
def test_a_buffer_made_like_a_parameter_does_not_write_to_what_was_copied_into_it(role: Role) -> None:
    source = scaled_tensor(torch.ones(2, 3), 4.0, role=role)
    average = torch.zeros_like(scaled_tensor(torch.ones(2, 3), 1.0, role=Role.WEIGHT))
    average.copy_(source)
    average.mul_(0.5)
    assert torch.equal(source.dequantize(), torch.full((2, 3), 4.0))
    assert torch.equal(average.dequantize(), torch.full((2, 3), 2.0))


def test_writes_that_would_not_reach_the_data_are_refused() -> None:
    ones, parameter = torch.ones(2, 3), nn.Parameter(scaled_tensor(torch.ones(2, 3), 4.0, role=Role.WEIGHT))
    with pytest.raises(UnsupportedError, match=r"`.data`"):
        parameter.data = parameter.data * 3
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"aten\.add\.out"):
        torch.add(ones, ones, out=parameter)

    parameter.data.mul_(3)
    with torch.no_grad():
        torch.add(parameter, 1, out=ones)
    assert torch.equal(parameter.dequantize(), torch.full((2, 3), 12.0))
    assert torch.equal(ones, torch.full((2, 3), 13.0))


@pytest.mark.parametrize("scale", [2.0**-12, torch.tensor(2.0**-12)])
def test_a_copy_into_a_16_bit_parameter_is_rounded_once(scale: float | Tensor) -> None:
    source = torch.tensor([1.234567e-6, -3e-7, 5e-8])
    parameter = scaled_tensor(torch.ones(3, dtype=torch.float16), scale, role=Role.WEIGHT)
    parameter.copy_(source)
    torch.testing.assert_close(parameter.dequantize(), source, rtol=2.0**-11, atol=0)


def test_complex_numbers_turn_as_they_do_in_plain_torch() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.view_as_complex(self.first(x).view(4, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
            return torch.view_as_real(turned * turned.conj()).flatten(1) + torch.fft.fft(turned).real.repeat(1, 2)

    torch.manual_seed(0)
    plain = Rotary()
    ours = scaled(copy.deepcopy(plain), strict=True)
    for model in (plain, ours):
        model(torch.arange(16.0).view(4, 4)).square().mean().backward()
    torch.testing.assert_close(ours.first.weight.grad.dequantize(), plain.first.weight.grad, rtol=1e-6, atol=1e-6)


def test_a_function_of_the_gradient_without_a_rule_is_refused() -> None:
    class Solving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.linalg.solve(x + 4 * torch.eye(4), self.first(x)))  # type: ignore[no-any-return]

    loss = scaled(Solving())(torch.randn(4, 4)).sum()
    with pytest.raises(UnsupportedError, match=r"linalg_lu_solve.*`LinalgSolveExBackward0`"):
        loss.backward()
