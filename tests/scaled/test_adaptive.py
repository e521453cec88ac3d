"""Adaptive layer-wise loss scaling: the factor, joins and ties, and the net that no constant loss scale can train."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.scaled import (
    AdaptiveOptions,
    ScaledTensor,
    StepGuard,
    adaptive_factor,
    adaptive_scaling,
    loss_scales,
    scaled,
)
from tests.helpers.scaled_models import build, loss_and_grads

DEPTH, WIDTH = 24, 128


def sigmoid_net(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    """24 sigmoid layers, N(0, 1.2²/128) weights: true gradients span 13 decades from the last layer to the first."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        linear = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(linear.weight, std=1.2 / math.sqrt(WIDTH))
        layers += [linear, nn.Sigmoid()]
    return nn.Sequential(*layers).to(dtype), torch.randn(64, WIDTH).to(dtype), torch.rand(64, WIDTH)


def zeroed_share(grads: list[Tensor]) -> float:
    """The share of gradient elements that are exactly zero; 1 where any is not finite."""
    flat = torch.cat([g.flatten() for g in grads])
    return float((flat == 0).float().mean()) if flat.isfinite().all() else 1.0


def constant_loss_scale(power: int) -> list[Tensor]:
    """fp16 gradients under the loss scale 2^power, unscaled in fp32."""
    net, x, y = sigmoid_net(torch.float16)
    loss = (net(x).float() - y).square().mean()
    (loss * 2.0**power).backward()
    return [p.grad.float() * 2.0**-power for p in net.parameters()]


def test_adaptive_scales_train_a_net_that_no_constant_can() -> None:
    net, x, y = sigmoid_net()
    adaptive_scaling(net, compute="fp16")
    (net(x).float() - y).square().mean().backward()
    grads = [p.grad for p in net.parameters()]
    reference_net, x64, y64 = sigmoid_net(torch.float64)
    (reference_net(x64) - y64).square().mean().backward()
    reference = [p.grad for p in reference_net.parameters()]

    best_constant = min(zeroed_share(constant_loss_scale(p)) for p in range(12, 33))

    assert best_constant > 0.15  # 2^26; one binade more overflows
    assert zeroed_share(grads) < 0.005
    assert max(float((g - r).norm() / r.norm()) for g, r in zip(grads, reference, strict=True)) < 0.05
    assert max(s for s, _ in loss_scales(net).values()) > 2.0**20


@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "llama"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_parameter_of_a_transformer_gets_its_plain_gradient(name: str, attention: str) -> None:
    plain, batch = build(name, attention)
    loss, reference = loss_and_grads(plain, batch)
    plain.zero_grad()
    ours = adaptive_scaling(copy.deepcopy(plain), compute="fp16", strict=True)

    our_loss, grads = loss_and_grads(ours, batch)

    assert our_loss == pytest.approx(float(loss), rel=2e-3)
    assert grads.keys() == reference.keys()  # tied weights too: the head's gradient is plain, the embedding's scaled
    assert not any(isinstance(g, ScaledTensor) for g in grads.values())
    cancelled = ("key.bias", "k_proj.bias")  # these gradients are zero in exact arithmetic
    errors = {
        n: float((g - reference[n]).norm() / reference[n].norm()) for n, g in grads.items() if not n.endswith(cancelled)
    }
    assert max(errors.values()) < 0.03


def test_attention_without_a_mask_keeps_its_probabilities_in_fp16() -> None:
    plain, batch = build("bert-mlm", "eager")
    del batch["attention_mask"]  # a mask in fp32 would widen them
    _, reference = loss_and_grads(plain, batch)
    plain.zero_grad()
    ours = adaptive_scaling(copy.deepcopy(plain), compute="fp16", strict=True)

    _, grads = loss_and_grads(ours, batch)

    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert (grads[name] - reference[name]).norm() < 0.03 * reference[name].norm()


class Exploding(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * math.inf


def test_a_step_that_overflowed_is_skipped_and_the_next_starts_lower() -> None:
    net, x, y = sigmoid_net()
    adaptive_scaling(net, compute="fp16")
    guard, optimizer = StepGuard(net, patience=2), torch.optim.SGD(net.parameters(), lr=0.1)
    before = net[0].weight.detach().clone()

    Exploding.apply(net(x).float()).sum().backward()
    assert not guard.step(optimizer)
    assert torch.equal(net[0].weight, before)

    starts = []
    for _ in range(3):
        optimizer.zero_grad()
        (net(x).float() - y).square().mean().backward()
        assert guard.step(optimizer)
        starts.append(loss_scales(net)["46"][0])
    assert guard.num_skipped == 1
    assert starts[2] == pytest.approx(2 * starts[0])


def test_fp32_adaptive_gradients_are_bitwise_those_of_the_plain_model() -> None:
    plain, batch = build("llama", "sdpa")
    _, reference = loss_and_grads(plain, batch)
    ours = adaptive_scaling(copy.deepcopy(plain), compute="fp32")
    ours.zero_grad()

    _, grads = loss_and_grads(ours, batch)

    assert [n for n, g in grads.items() if not torch.allclose(g, reference[n], rtol=1e-5, atol=1e-9)] == []


def test_a_unit_scaled_model_needs_no_further_scaling() -> None:
    plain, batch = build("bert-mlm", "sdpa")
    ours = scaled(plain, method="unit", compute="fp16")
    factors: dict[str, float] = {}

    def watch(name: str, module: nn.Module) -> None:
        def on_grad(grad: Tensor) -> None:
            data, weight = grad.data_part.flatten(0, -2), module.weight.data_part
            factors[name] = float(adaptive_factor(data, weight, 1.0, "fp16", AdaptiveOptions()))

        module.register_forward_hook(lambda _, __, out: out.register_hook(on_grad) and None)

    for name, module in ours.named_modules():
        if isinstance(module, nn.Linear) and "encoder" in name:
            watch(name, module)
    ours(**batch).loss.backward()

    assert len(factors) == 12
    assert max(abs(math.log2(f)) for f in factors.values()) <= 1


def test_the_factor_delivers_the_chosen_underflow() -> None:
    torch.manual_seed(0)
    grad, weight = torch.randn(512, 256) * 1e-6, torch.randn(256, 256) * 1e-3
    options = AdaptiveOptions(threshold=1e-2, layer_bound=2.0**30)

    factor = adaptive_factor(grad, weight, 1.0, "fp16", options)

    exact = (grad.double() @ weight.double()) * float(factor)
    lost = float((exact.half() == 0).float().mean())
    assert (
        0.25e-2 < lost < 1e-2
    )  # rounding flushes below half the smallest number; flooring to 2^k costs up to 2x; σ_o has ½


def test_bounds_on_the_factor_hold() -> None:
    def factor(grad: float, weight: float, scale: float = 1.0, **options: Any) -> float:
        sizes = torch.full((4, 8), grad), torch.full((8, 8), weight)
        return float(adaptive_factor(*sizes, scale, "fp16", AdaptiveOptions(**options)))

    assert factor(1e-12, 1e-3, layer_bound=16) == 16
    assert factor(1e-12, 1e-3, scale=2.0**-8, total_bound=1024) == 4
    assert factor(6e4, 1e3) * 6e4 * 1e3 * 8 < 65504  # a product of the layer
    assert factor(6e4, 1e-12) == 1  # the gradient itself
    assert [factor(bad, 1.0) for bad in (0.0, math.inf, math.nan)] == [1, 1, 1]


@pytest.mark.parametrize(
    "wrong", [{"threshold": 0}, {"floor": "zero"}, {"every": 0}, {"layer_bound": 0.5}, {"casts": "normal"}], ids=str
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AdaptiveOptions(**wrong)


@pytest.mark.parametrize("compute", ["fp8", "fp4", "fp2"])
def test_a_compute_it_has_not_is_refused_before_the_model_is_touched(compute: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError):
        adaptive_scaling(net, compute=compute)
    assert (type(net), type(net[0])) == (nn.Sequential, nn.Linear)


def test_lognormal_casts_lose_the_chosen_fraction() -> None:
    model = adaptive_scaling(nn.Sequential(nn.Linear(2, 2)), options=AdaptiveOptions(casts="lognormal"))
    assert model.lpconv_scaling.numerics.cast_underflow == AdaptiveOptions().threshold


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_an_empty_batch_has_gradients_of_zero(compute: str) -> None:
    model = adaptive_scaling(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), compute=compute)
    model(torch.ones(0, 4)).sum().backward()
    assert all(not p.grad.any() for p in model.parameters())
