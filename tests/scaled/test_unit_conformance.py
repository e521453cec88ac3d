"""Unit scaling: its factors against the paper's constants, and against the authors' package where the rules agree.

A rule here floors each factor to a power of two, and the factor goes into a recorded scale; the package multiplies by
the exact factor and drops it. At sizes whose roots are powers of two the data of the two must therefore be the same.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as some
from torch import Tensor

from lpconv.layers import weighted_modules
from lpconv.scaled import EdgeFactors, ScaledTensor, apply_factors, scaled, scaled_tensor
from tests.helpers.scaled_models import build, loss_and_grads

LINEAR = [(64, 256), (16, 256)]  # √256 terms forward, √16 back to the input, √64 for the weight
CONV = [(16, 16, 19), (16, 16, 4)]  # √(16·4) terms forward and back to the input, √(16·16) for the weight


def oracle(name: str) -> Callable[..., Tensor]:
    """A function of the unit-scaling package without constraint: every factor is its own, as here."""
    functional = pytest.importorskip("unit_scaling.functional")
    return getattr(functional, name)  # type: ignore[no-any-return]


# Ours, theirs, and the shapes of the operands. All operands and gradients are N(0, 1).
SAME_RULE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "linear": (F.linear, lambda x, w: oracle("linear")(x, w, None, constraint=None), LINEAR),
    "matmul": (torch.matmul, lambda a, b: oracle("matmul")(a, b, constraint=None), [(64, 256), (256, 16)]),
    "batched matmul": (torch.matmul, lambda a, b: oracle("matmul")(a, b, constraint=None), [(3, 64, 16), (3, 16, 4)]),
    "conv1d": (F.conv1d, lambda x, w: oracle("conv1d")(x, w, None, constraint=None), CONV),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (32,), w, b),
        lambda x, w, b: oracle("layer_norm")(x, (32,), w, b),
        [(64, 32), (32,), (32,)],
    ),
}  # fmt: skip


def data_and_grads(function: Callable[..., Tensor], operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Data of the result and of every gradient."""
    leaves = [x.requires_grad_() for x in operands]
    out = function(*leaves)
    out.backward(gradient=grad)
    found = [out.detach(), *(x.grad for x in leaves)]
    return [x.data_part if isinstance(x, ScaledTensor) else x for x in found if x is not None]


@pytest.mark.parametrize("name", SAME_RULE)
def test_data_are_those_of_the_unit_scaling_package(name: str) -> None:
    ours, theirs, shapes = SAME_RULE[name]
    torch.manual_seed(0)
    plain = [torch.randn(shape) for shape in shapes]
    grad = torch.randn(ours(*plain).shape)
    pairs = [scaled_tensor(x.clone(), 1.0) for x in plain]

    expected = data_and_grads(theirs, [x.clone() for x in plain], grad)
    found = data_and_grads(ours, pairs, scaled_tensor(grad, 1.0))

    assert len(found) == 1 + len(shapes)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-5, atol=2e-5)


def test_cross_entropy_gradients_are_those_of_the_package_up_to_the_floor() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(64, 256), torch.randint(0, 256, (64,))
    theirs = logits.clone().requires_grad_()
    oracle("cross_entropy")(theirs, target).backward()
    ours = scaled_tensor(logits, 1.0).requires_grad_()

    F.cross_entropy(ours, target).backward(gradient=scaled_tensor(torch.ones(()), 1.0))

    exact = 256 / math.sqrt(255)  # V/√(V-1); ours is 2^⌊log2 √V⌋ = 16, and 1/N is in the scale
    torch.testing.assert_close(ours.grad.data_part * exact / 16, theirs.grad, rtol=1e-5, atol=1e-6)


# What the paper's authors measured on N(0, 1) input (examples/Ops.ipynb): 1/std of the output and of the gradient.
# An activation keeps its scale here, so these constants stay visible in the data.
MEASURED: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "gelu": (F.gelu, 1.701, 1.481),
    "tanh": (torch.tanh, 1.593, 1.467),
    "sigmoid": (torch.sigmoid, 4.802, 4.722),
    "relu": (F.relu, math.sqrt(2 / (1 - 1 / math.pi)), math.sqrt(2)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_activations_have_the_measured_standard_deviations(name: str) -> None:
    function, forward, backward = MEASURED[name]
    torch.manual_seed(0)
    x = scaled_tensor(torch.randn(1 << 20), 1.0).requires_grad_()
    out = function(x)
    out.backward(gradient=scaled_tensor(torch.randn(1 << 20), 1.0))

    rms_of_gradient = float(x.grad.data_part.square().mean().sqrt())
    assert float(out.data_part.std()) * forward == pytest.approx(1, rel=5e-3)  # 2^20 samples: sigma 1e-3
    assert rms_of_gradient * backward == pytest.approx(1, rel=5e-3)


@pytest.mark.parametrize("keys", [4, 64, 256])
def test_uniform_attention_has_unit_probabilities(keys: int) -> None:
    scores = scaled_tensor(torch.zeros(8, keys), 1.0)
    assert torch.equal(scores.softmax(-1).data_part, torch.ones(8, keys))  # α = s of the paper's table A.2


@pytest.mark.parametrize("size", [16, 100, 1000, 5000])
@pytest.mark.parametrize("name", ["linear", "sum", "layer norm"])
def test_contractions_of_unit_data_have_unit_data(name: str, size: int) -> None:
    """1 ≤ √K / 2^⌊log2 √K⌋ < 2; the bounds below leave 10 % for the sampling of 64 rows."""
    torch.manual_seed(0)
    x = scaled_tensor(torch.randn(64, size), 1.0).requires_grad_()
    w = scaled_tensor(torch.randn(64, size), 1.0).requires_grad_()
    b = scaled_tensor(torch.randn(size), 1.0).requires_grad_()
    functions: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: F.linear(x, w),
        "sum": lambda: x.sum(1),
        "layer norm": lambda: F.layer_norm(x, (size,), None, b),
    }
    out = functions[name]()
    out.backward(gradient=scaled_tensor(torch.randn(out.shape), 1.0))

    for tensor in (out, *(leaf.grad for leaf in (x, w, b) if leaf.grad is not None)):
        assert 0.9 <= float(tensor.data_part.square().mean().sqrt()) <= 2.2


# 15 edges in a row at 2^±8 stay within fp32's range; at 2^±12 the data of gradients leave it.
powers = some.integers(-8, 8).map(lambda e: 2.0**e)


@settings(max_examples=12, deadline=None)
@given(some.data())
def test_no_choice_of_factors_can_turn_a_gradient(data: Any) -> None:
    """The paper's constraint (§5.1): factors off the path product rotate gradients silently. Recorded ones cannot."""
    plain, batch = build("bert-mlm", num_layers=1)
    ours = scaled(copy.deepcopy(plain), strict=True)
    names = sorted(weighted_modules(ours))
    chosen = data.draw(some.dictionaries(some.sampled_from(names), some.tuples(powers, powers), min_size=1))
    apply_factors(ours, {name: EdgeFactors(forward=f, backward=b) for name, (f, b) in chosen.items()})

    (loss, grads), (our_loss, our_grads) = loss_and_grads(plain, batch), loss_and_grads(ours, batch)

    assert torch.equal(our_loss, loss)
    assert [n for n, g in our_grads.items() if not torch.equal(g.dequantize(), grads[n])] == []
