"""Skipping steps whose gradients overflowed, and starting the next ones lower."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.scale import rms
from lpconv.scaled import StepGuard, check_gradients, gradients_are_finite, scaled, scaled_tensor
from lpconv.scaled.pair import Role
from lpconv.scaled.rules import RULES
from tests.helpers.scaled_models import build


def net_behind_a_norm() -> tuple[nn.Module, Tensor, Tensor]:
    """A layer whose results are so small that the norm after it hands down gradients 2^15 times as large."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, eps=1e-14))
    return net, torch.randn(64, 16), torch.randn(64, 16)


def backward(net: nn.Module, x: Tensor, y: Tensor) -> None:
    net.zero_grad()
    (net(x).float() - y).square().mean().backward()


def test_an_overflow_behind_a_rescaling_ends_after_a_few_halvings() -> None:
    net, x, y = net_behind_a_norm()
    ours = scaled(copy.deepcopy(net), method="scalify", compute="fp16")
    with torch.no_grad():
        for weight in (*net[0].parameters(), *(p.data_part for p in ours[0].parameters())):
            weight.mul_(2.0**-15)
    backward(net, x, y)
    reference = net[0].weight.grad
    guard, optimizer = StepGuard(ours), torch.optim.SGD(ours.parameters(), lr=0.0)

    taken = []
    for _ in range(8):
        backward(ours, x.half(), y)
        taken.append(guard.step(optimizer))

    assert not taken[0]
    assert taken[-1]
    assert guard.num_skipped < 8
    grad = ours[0].weight.grad.dequantize()
    assert (grad - reference).norm() < 0.02 * reference.norm()


def test_a_gradient_with_an_infinite_scale_is_an_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    for scale, is_finite in ((2.0**127, True), (torch.inf, False)):
        parameter.grad = scaled_tensor(torch.ones(2), torch.tensor(scale), role=Role.GRADIENT)
        assert gradients_are_finite([parameter]) == is_finite


class Attention(nn.Module):
    """Weights of attention over given values, the scores being parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Parameter(4 * torch.randn(8, 64))

    def forward(self, values: Tensor) -> Tensor:
        return self.scores.softmax(-1) @ values


def test_the_gradient_of_scores_is_rescaled_where_no_module_holds_them() -> None:
    plain, values = Attention(), 512 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    plain(values).square().mean().backward()

    def error_and_rms(*places: str) -> tuple[float, float]:
        ours = scaled(copy.deepcopy(plain), method="scalify", compute="fp16", rescale=places)
        ours.zero_grad()
        ours(values.half()).float().square().mean().backward()
        grad = ours.scores.grad
        error = (grad.dequantize() - plain.scores.grad).norm() / plain.scores.grad.norm()
        return float(error), float(rms(grad.data_part))

    assert error_and_rms()[1] > 100
    error, size = error_and_rms("softmax_grad")
    assert 1 <= size < 2
    assert error < 5e-3


def test_the_guard_goes_on_where_its_state_was_taken() -> None:
    net, x, y = net_behind_a_norm()
    ours, other = (scaled(copy.deepcopy(net), method="scalify", compute="fp16") for _ in range(2))
    guard, resumed = StepGuard(ours, patience=2), StepGuard(other, patience=2)
    for found in (True, True, False):
        guard.update(found)

    resumed.load_state_dict(guard.state_dict())
    for model in (ours, other):
        backward(model, x.half(), y)

    assert resumed.scale == guard.scale == 0.25
    assert torch.equal(ours[0].weight.grad.data_part, other[0].weight.grad.data_part)
    resumed.update(False)
    assert resumed.scale == 0.5


def test_a_model_that_is_not_scaled_has_no_guard() -> None:
    with pytest.raises(UsageError, match="scaled"):
        StepGuard(nn.Linear(2, 2))


def test_a_wrong_rule_is_found_before_training_and_the_gradient_nearest_to_the_loss_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = build("bert-mlm")
    op = torch.ops.aten.gelu_backward.default
    right = RULES[op]
    check_gradients(model, batch, scaled)

    monkeypatch.setitem(
        RULES, op, lambda call, grad, *args, **kw: right(call, grad._replace(scale=2 * grad.scale), *args, **kw)
    )
    with pytest.raises(UnsupportedError, match=r"cls\.predictions\.transform\.dense\.bias.* 1 "):
        check_gradients(model, batch, scaled)

    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_forward_pass_is_found_by_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("bert-mlm")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.cls.predictions.decoder.bias)
    monkeypatch.setitem(RULES, torch.ops.aten.gelu.default, lambda call, x, **kw: x)
    with pytest.raises(UnsupportedError, match=r"\(loss \d"):
        check_gradients(model, batch, scaled)
