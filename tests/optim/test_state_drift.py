"""Second moments of 16 bits against fp64, over time constants, and after the gradients have fallen tenfold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpconv.optim import CollageLion, CollageSGD, LowPrecisionAdamW
from lpconv.optim.storage import stored_value
from lpconv.scaled import AdamW

LR, SIZE, STEPS = 1e-4, 512, 800
Make = Callable[[nn.Parameter, float], torch.optim.Optimizer]


def scaled_adamw(dtype: torch.dtype) -> Make:
    return lambda p, beta2: AdamW([p], lr=LR, betas=(0.9, beta2), state_dtype=dtype)


def in_variant(variant: str, arithmetic: str = "fused") -> Make:
    return lambda p, beta2: LowPrecisionAdamW(
        [p], lr=LR, betas=(0.9, beta2), variant=variant, arithmetic=arithmetic, compiled=False
    )


KEPT: dict[str, Make] = {
    **{f"scaled {dtype}": scaled_adamw(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    **{
        variant: in_variant(variant) for variant in ("plus", "fp32-moments", "eco")
    },  # all that keep v otherwise than in bf16
    "plus, paper": in_variant("plus", "paper"),
    "light": in_variant("light"),  # as all that keep v in bf16
}
DECAYS = {name: (0.95,) if name == "light" else (0.95, 0.999, 0.9995) for name in KEPT}


def second_moment(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Tensor:
    """v, whatever it is kept as."""
    if isinstance(optimizer, LowPrecisionAdamW):
        return stored_value(optimizer.storages(p)[2], optimizer.parts(p)[2]).double()
    state = optimizer.state[p]
    kept: Tensor = state["exp_avg_sq"].double()
    return kept if "exp_avg_sq_scale" not in state else (kept * state["exp_avg_sq_scale"].double()).square()


@pytest.mark.parametrize(("name", "beta2"), [(name, beta2) for name in KEPT for beta2 in DECAYS[name]])
def test_second_moments_follow_fp64_and_fall_with_the_gradients(name: str, beta2: float) -> None:
    """N(0, 1) gradients for 800 steps, then a tenth for as many; the means over 512 weights are of the truth."""
    p = nn.Parameter(torch.zeros(SIZE, dtype=torch.float32 if name.startswith("scaled") else torch.bfloat16))
    exact = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    optimizer = KEPT[name](p, beta2)
    reference = torch.optim.AdamW([exact], lr=LR, betas=(0.9, beta2))
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 0.1):
        for _ in range(STEPS):
            gradient = torch.randn(SIZE, generator=generator).bfloat16() * size
            p.grad, exact.grad = gradient.to(p.dtype), gradient.to(p.dtype).double()
            optimizer.step()
            reference.step()
        ratio = second_moment(optimizer, p) / reference.state[exact]["exp_avg_sq"]
        # bf16 moves by 2^-8 once in ten steps or so: unbiased, and each weight's own noise is a few percent.
        assert float(ratio.mean()) == pytest.approx(1, abs=0.02)
        assert float(ratio.std()) < (0.15 if name == "scaled torch.bfloat16" else 0.04)
    if name.startswith("scaled"):
        assert float((p.detach().double() - exact.detach()).norm() / exact.detach().norm()) < 0.1


@pytest.mark.parametrize("is_by_row", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_gradients_of_very_different_sizes_fit_one_scale(dtype: torch.dtype, bound: float, is_by_row: bool) -> None:
    """Gradients from 1e-6 to 1e2 in one tensor: where 16-bit state moves the weights is where fp32 state does."""
    rows, cols, steps = 64, 64, 30
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 2, rows * cols).view(rows, cols)
    if not is_by_row:
        sizes = sizes.view(-1)[torch.randperm(rows * cols, generator=generator)].view(rows, cols)
    gradients = sizes * (torch.randn(steps, rows, cols, generator=generator) + 0.5)

    def moved(state_dtype: torch.dtype) -> Tensor:
        p = nn.Parameter(torch.zeros(rows, cols))
        optimizer = AdamW([p], lr=LR, eps=1e-12, state_dtype=state_dtype)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        return p.detach()

    wanted = moved(torch.float32)
    assert float((moved(dtype) - wanted).norm() / wanted.norm()) < bound


# In bf16 a decay of 1 % is 1.3 to 2.6 steps, rounded to whole ones.
@pytest.mark.parametrize(
    ("variant", "decay", "bound"), [("light", 0.9, 0.03), ("light", 0.99, 0.15), ("full", 0.99, 1e-3)]
)
@pytest.mark.parametrize("make", [CollageSGD, CollageLion])
def test_momentum_follows_fp64_and_falls_with_the_gradients(
    make: Any, variant: str, decay: float, bound: float
) -> None:
    """A gradient of its own size for each weight and half as much noise; then a hundredth of it."""
    p = nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16))
    options = {"betas": (0.9, decay)} if make is CollageLion else {"momentum": decay, "dampening": decay}
    optimizer = make([p], lr=LR, variant=variant, compiled=False, **options)
    generator = torch.Generator().manual_seed(0)
    mean, exact = torch.randn(SIZE, generator=generator), torch.zeros(SIZE, dtype=torch.float64)
    for size in (1.0, 0.01):
        for step in range(int(5 / (1 - decay))):
            p.grad = ((mean + 0.5 * torch.randn(SIZE, generator=generator)) * size).bfloat16()
            first = make is CollageSGD and size == 1.0 and step == 0  # torch's SGD starts at the gradient itself
            exact = exact * decay + p.grad.double() * (1.0 if first else 1 - decay)
            optimizer.step()
        actual = stored_value(optimizer.storages(p)[1], optimizer.parts(p)[1]).double()
        assert float((actual - exact).norm() / exact.norm()) < bound


def test_state_of_16_bits_is_the_same_in_a_resumed_run() -> None:
    def run(split: bool) -> Tensor:
        p = nn.Parameter(torch.ones(64))
        optimizer = AdamW([p], state_dtype=torch.float16)
        for step in range(6):
            if split and step == 3:
                state, optimizer = optimizer.state_dict(), AdamW([p], state_dtype=torch.float16)
                optimizer.load_state_dict(state)
                torch.rand(7)
            p.grad = torch.randn(64, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        return p.detach()

    assert torch.equal(run(split=False), run(split=True))
