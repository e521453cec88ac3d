"""Adaptive loss scaling of convolutions: gradients of every shape of them, their factor, casts from fp32."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpconv.scaled import (
    AdaptiveOptions,
    ScaledTensor,
    adaptive_factor,
    adaptive_scaling,
    fallbacks,
    loss_scales,
    scaled_tensor,
)
from lpconv.scaled.pair import Numerics

CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "a line": (nn.Conv1d, {"padding": 1}),
    "an image": (nn.Conv2d, {"padding": 1, "bias": False}),
    "a volume": (nn.Conv3d, {"padding": 1}),
    "steps and groups": (nn.Conv2d, {"stride": 2, "dilation": 2, "groups": 2}),
    "padding by name": (nn.Conv1d, {"padding": "same", "dilation": 2}),
    "padding by reflection": (nn.Conv2d, {"padding": 1, "padding_mode": "reflect"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_batch", [True, False])
def test_fp32_gradients_are_those_of_the_plain_convolution(name: str, is_batch: bool) -> None:
    torch.manual_seed(0)
    kind, options = CASES[name]
    plain = nn.Sequential(kind(4, 6, 3, **options))
    num_axes = plain[0].weight.dim() - 2
    x = torch.randn(*([2] if is_batch else []), 4, *[8] * num_axes, requires_grad=True)
    plain(x).square().sum().backward()
    expected = [x.grad, *(p.grad for p in plain.parameters())]
    ours, x.grad = adaptive_scaling(copy.deepcopy(plain), compute="fp32"), None
    ours.zero_grad()

    ours(x).square().sum().backward()

    found = [x.grad, *(p.grad for p in ours.parameters())]
    for ours_grad, grad in zip(found, expected, strict=True):
        values = ours_grad.dequantize() if isinstance(ours_grad, ScaledTensor) else ours_grad
        torch.testing.assert_close(values, grad, rtol=1e-5, atol=1e-5)


class Residual(nn.Module):
    """A small residual classifier of 8 x 8 images whose first layers have faint gradients."""

    def __init__(self, faint: float) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head, self.faint = nn.Linear(8, 10), faint

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = x + self.last(F.relu(self.inner(x)) * self.faint)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)).float(), labels)


def test_a_residual_network_gets_its_plain_gradients_without_a_fallback() -> None:
    torch.manual_seed(0)
    plain, x, labels = Residual(2.0**-14), torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    ours = adaptive_scaling(copy.deepcopy(plain), compute="fp16", strict=True)
    exact = copy.deepcopy(plain).double()
    exact(x.double(), labels).backward()

    ours(x, labels).backward()

    errors = {
        n: float((dict(ours.named_parameters())[n].grad - p.grad).norm() / p.grad.norm())
        for n, p in exact.named_parameters()
        if n not in ("first.bias",)  # zero in exact arithmetic: the norm takes it away
    }
    assert max(errors.values()) < 0.03
    assert fallbacks(ours) == {}
    scales = loss_scales(ours)
    assert set(scales) == {"first", "inner", "last", "head"}
    assert scales["inner"][0] > scales["head"][0]  # the faint branch was scaled up


def test_the_factor_of_a_convolution_delivers_the_chosen_underflow() -> None:
    torch.manual_seed(0)
    grad, weight = torch.randn(16, 32, 12, 12) * 1e-6, torch.randn(32, 16, 3, 3) * 1e-3
    options = AdaptiveOptions(threshold=1e-2, layer_bound=2.0**30)

    factor = adaptive_factor(grad, weight, 1.0, "fp16", options, num_terms=32 * 9)

    exact = F.conv_transpose2d(grad.double(), weight.double())[:, :, 2:-2, 2:-2] * float(factor)
    assert 0.25e-2 < float((exact.half() == 0).float().mean()) < 1e-2


def cast(data: Tensor, underflow: float) -> ScaledTensor:
    found = scaled_tensor(data, 1.0, numerics=Numerics(fit_joins=True, cast_underflow=underflow)).half()
    assert isinstance(found, ScaledTensor)
    return found


def test_casts_of_log_normal_gradients_lose_the_chosen_share() -> None:
    torch.manual_seed(0)
    grad = torch.exp(torch.randn(100_000) * 2 + math.log(2.0**-30))
    lost = {t: float((cast(grad, t).data_part == 0).float().mean()) for t in (0.0, 0.05)}
    assert lost[0.0] > 0.9
    assert 0.0 < lost[0.05] < 0.05
    torch.testing.assert_close(cast(grad, 0.05).dequantize(), grad, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("data", [torch.tensor([2.0**-60, 2.0**30]), torch.zeros(2), torch.tensor([math.inf, 1e-9])])
def test_a_cast_never_overflows_for_the_sake_of_what_is_small(data: Tensor) -> None:
    found = cast(data, 0.01)
    assert torch.equal(found.data_part.isfinite(), data.isfinite())
    assert torch.equal(found.dequantize()[data > 1], data[data > 1])
