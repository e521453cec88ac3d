"""What holds for every loss scale: names, options, states; and unscaling in every dtype."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.loss_scale import LOSS_SCALES, LossScale, largest_gradient, make_loss_scale, unscale_
from lpconv.scaled import scaled

OPTIONS: dict[str, dict[str, Any]] = {"constant": {"scale": 128.0}, "dynamic": {"growth_interval": 5}}
EVERY = pytest.mark.parametrize("name", LOSS_SCALES)


def make(name: str) -> LossScale:
    return make_loss_scale(name, **OPTIONS.get(name, {}))


def run(scale: LossScale, steps: range) -> list[float]:
    scales = []
    for step in steps:
        bad = step % 13 == 3
        scale.update(bad, max_gradient=None if bad else 2.0 ** -(step % 7))
        scales.append(scale.scale)
    return scales


@EVERY
def test_a_resumed_scale_goes_on_as_if_it_had_never_stopped(name: str) -> None:
    whole, first, second = make(name), make(name), make(name)
    expected = run(whole, range(200))

    run(first, range(90))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert run(second, range(90, 200)) == expected[90:]
    assert list(second.history) == list(whole.history)
    assert second.num_skipped == whole.num_skipped == len(range(3, 200, 13))
    assert second.state_dict() == whole.state_dict()


@EVERY
def test_the_state_of_another_rule_is_refused_and_changes_nothing(name: str) -> None:
    scale = make(name)
    before = scale.state_dict()
    for wrong in ({}, make("dynamic" if name != "dynamic" else "logmax").state_dict(), before | {"rule": {"x": 1}}):
        with pytest.raises(InputError):
            scale.load_state_dict(wrong)
    assert scale.state_dict() == before


def test_scales_that_stay() -> None:
    assert set(run(make("none"), range(50))) == {1.0}
    constant = make("constant")
    assert set(run(constant, range(50))) == {128.0}
    assert list(constant.history) == [(0, 128.0)]


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("dynamik", {}, "dynamic"),
        ("adaptive", {}, "known"),
        ("dynamic", {"growth_intervall": 3}, "growth_interval"),
        ("constant", {}, "scale="),
        ("constant", {"scale": 0.0}, "above 0"),
        ("constant", {"scale": math.inf}, "finite"),
        ("dynamic", {"init_scale": -1}, "above 0"),
        ("dynamic", {"growth_factor": 1.0}, "above 1"),
        ("dynamic", {"backoff_factor": 1.0}, "between"),
        ("dynamic", {"growth_interval": 0}, " 1"),
        ("dynamic", {"floor": "soon"}, "STEP:SCALE"),
        ("logmax", {"smallest": 8.0, "largest": 4.0}, "increasing"),
        ("logmax", {"min_deviation": math.nan}, " 0"),
        ("none", {"scale": 2.0}, "known"),
    ],
)
def test_bad_requests_say_what_would_do(name: str, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError) as error:
        make_loss_scale(name, **options)
    assert hint in (error.value.hint or "")


def with_gradients(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient.clone()
    return [*parameters, nn.Parameter(torch.zeros(1))]  # the last one has no gradient


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_gradients_are_divided_in_their_own_dtype(dtype: torch.dtype, scale: float) -> None:
    gradients = [torch.randn(3, 4).to(dtype) * 100, torch.tensor(7.0, dtype=dtype), torch.zeros(0, dtype=dtype)]
    parameters = with_gradients(*gradients)

    assert not unscale_(parameters, scale)

    for p, g in zip(parameters, gradients, strict=False):
        assert torch.equal(p.grad, g / scale)
        assert p.grad.dtype == dtype
    assert largest_gradient(parameters) == pytest.approx(max(float((g / scale).abs().amax()) for g in gradients[:2]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_is_found(dtype: torch.dtype, bad: float) -> None:
    gradient = torch.zeros(5, 5, dtype=dtype)
    gradient[3, 2] = bad
    assert unscale_(with_gradients(torch.ones(4, dtype=dtype), gradient), 2.0)
    assert not unscale_(with_gradients(torch.ones(4, dtype=dtype)), 2.0)


def test_fp16_gradients_lose_what_fp32_gradients_keep() -> None:
    half, full = with_gradients(torch.tensor([1e-7]).half(), torch.tensor([1e-7]))[:2]
    unscale_([half, full], 2.0**16)
    assert float(half.grad) == 0
    assert float(full.grad) > 0


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scales_that_divide_nothing_are_refused(scale: float) -> None:
    with pytest.raises(UsageError):
        unscale_([], scale)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        unscale_(embedding.parameters(), 2.0)


@pytest.mark.parametrize("method", ["unit", "scalify"])
def test_scaled_gradients_are_divided_too(method: str) -> None:
    net = scaled(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), method=method, compute="fp16")
    net(torch.randn(3, 4)).float().square().mean().backward()
    before = [p.grad.dequantize() for p in net.parameters()]

    assert not unscale_(net.parameters(), 1024.0)

    for p, g in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.grad.dequantize(), g / 1024)
    assert largest_gradient(net.parameters()) == pytest.approx(max(float(g.abs().amax()) for g in before) / 1024)
