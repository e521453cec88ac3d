"""AdamW in fp64 with the same gradients: what every variant is measured against."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpconv.optim import LowPrecisionAdamW
from lpconv.optim.storage import stored_value

__all__ = ["Outcome", "adamw_fp64", "gradients", "run_beside_fp64"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Relative error of the total displacement of the weights, and the median of v over the true v."""

    displacement_error: float
    v_ratio: float


@functools.cache
def gradients(num_weights: int, steps: int) -> list[Tensor]:
    """bf16 gradients with a persistent direction and noise whose size varies from step to step."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(num_weights, generator=generator) * 1e-3
    return [
        (mean + torch.randn(num_weights, generator=generator) * 1e-2 * torch.rand(1, generator=generator)).bfloat16()
        for _ in range(steps)
    ]


def learning_rate(step: int) -> float:
    return 1e-4 * min(1.0, step / 100)


def adamw_fp64(weights: Tensor, grads: list[Tensor], beta2: float) -> tuple[Tensor, Tensor]:
    """(weights, v) after the steps, by the textbook formulas (Loshchilov & Hutter, arXiv 1711.05101)."""
    x, m, v = weights.double(), torch.zeros_like(weights.double()), torch.zeros_like(weights.double())
    for t, grad in enumerate(grads, start=1):
        g, lr = grad.double(), learning_rate(t)
        m = 0.9 * m + 0.1 * g
        v = beta2 * v + (1 - beta2) * g * g
        x = x - lr * (m / (1 - 0.9**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8) + 0.1 * x)
    return x, v


def run_beside_fp64(
    beta2: float, variant: str, arithmetic: str = "fused", *, compiled: bool = False, num_weights: int = 5_000
) -> Outcome:
    """1,500 steps from N(0, 0.02) weights, learning rate 1e-4 after a warm-up of 100, weight decay 0.1."""
    weights = (torch.randn(num_weights, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    grads = gradients(num_weights, 1500)
    p = nn.Parameter(weights.clone())
    optimizer = LowPrecisionAdamW(
        [p], betas=(0.9, beta2), weight_decay=0.1, variant=variant, arithmetic=arithmetic, compiled=compiled
    )
    for t, grad in enumerate(grads, start=1):
        p.grad = grad
        optimizer.param_groups[0]["lr"] = learning_rate(t)
        optimizer.step()
    x, v = adamw_fp64(weights, grads, beta2)
    storages, parts = optimizer.storages(p), optimizer.parts(p)
    moved, wanted = stored_value(storages[0], parts[0]).double() - weights.double(), x - weights.double()
    return Outcome(
        displacement_error=float((moved - wanted).norm() / wanted.norm()),
        v_ratio=float((stored_value(storages[2], parts[2]).double() / v).median()),
    )
