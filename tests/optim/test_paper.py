"""`arithmetic="paper"` is the published algorithm, operation by operation, eager and compiled."""

import math

import pytest
import torch
from torch import Tensor, nn

from lpconv.mcf.expansion import expand_scalar, grow, mul
from lpconv.optim import CollageAdamW
from tests.helpers.exact_compile import compile_keeps_roundings

LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
COUNT = 5000


def start() -> Tensor:
    return (torch.randn(COUNT, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def gradient(step: int) -> Tensor:
    return (torch.randn(COUNT, generator=torch.Generator().manual_seed(step)) * 1e-2).bfloat16()


def add_scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """a + scale · b, rounded once. `a.add(b, alpha=scale)` would round the scale to bf16 first (PyTorch on CPU)."""
    return torch.addcmul(a, b, torch.ones_like(b), value=scale)


def algorithm_2(variant: str, steps: int) -> list[Tensor]:
    """Literally, with PyTorch's own bf16 operations and Python scalars; gives theta, d_theta, m, v, and d_v in plus."""
    beta2 = [torch.full((COUNT,), part, dtype=torch.bfloat16) for part in expand_scalar(BETA2)]
    theta, d_theta, m, v, d_v = start(), *(torch.zeros(COUNT, dtype=torch.bfloat16) for _ in range(4))
    for t in range(1, steps + 1):
        g = gradient(t)
        m = add_scaled(m * BETA1, g, 1 - BETA1)
        if variant == "light":
            v = (v * BETA2).addcmul(g, g, value=1 - BETA2)
        else:
            square = torch.zeros_like(g).addcmul(g, g, value=1 - BETA2)
            v, d_v = grow(mul((v, d_v), (beta2[0], beta2[1])), square)
        denominator = v.sqrt() / math.sqrt(1 - BETA2**t) + EPS
        update = add_scaled(m / denominator * (-LR / (1 - BETA1**t)), theta, -LR * DECAY)
        theta, d_theta = grow((theta, d_theta), update)
    return [theta, d_theta, m, v, *([d_v] if variant == "plus" else [])]


def optimizer_after(variant: str, steps: int, *, compiled: bool) -> list[Tensor]:
    p = nn.Parameter(start())
    optimizer = CollageAdamW(
        [p], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, variant=variant, arithmetic="paper",
        compiled=compiled,
    )  # fmt: skip
    for t in range(1, steps + 1):
        p.grad = gradient(t)
        optimizer.step()
    return [t for tensors in optimizer.parts(p) for t in tensors]


@pytest.mark.parametrize("variant", ["light", "plus"])
def test_eager_is_the_algorithm_bit_for_bit(variant: str) -> None:
    for actual, wanted in zip(optimizer_after(variant, 20, compiled=False), algorithm_2(variant, 20), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.skipif(not compile_keeps_roundings(), reason="this build of torch.compile cannot keep bf16 roundings")
def test_compiled_is_the_algorithm_too() -> None:
    """But for the last bit of sqrt in fp32, which now and then turns a rounding to bf16."""
    for actual, wanted in zip(optimizer_after("plus", 20, compiled=True), algorithm_2("plus", 20), strict=True):
        assert float((actual == wanted).double().mean()) > 0.99
