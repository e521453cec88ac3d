"""Second moments of 16 bits against fp64, over time constants, and after the gradients have fallen tenfold."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lpconv.optim import LowPrecisionAdamW
from lpconv.optim.storage import total
from lpconv.scaled import AdamW

LR, SIZE, STEPS = 1e-4, 512, 800
Make = Callable[[nn.Parameter, float], torch.optim.Optimizer]


def scaled_adamw(dtype: torch.dtype) -> Make:
    return lambda p, beta2: AdamW([p], lr=LR, betas=(0.9, beta2), state_dtype=dtype)


def in_variant(variant: str) -> Make:
    return lambda p, beta2: LowPrecisionAdamW([p], lr=LR, betas=(0.9, beta2), variant=variant, compiled=False)


KEPT: dict[str, Make] = {
    **{f"scaled {dtype}": scaled_adamw(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    **{variant: in_variant(variant) for variant in ("plus", "full")},
}


def second_moment(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Tensor:
    """v, whatever it is kept as."""
    if isinstance(optimizer, LowPrecisionAdamW):
        return total(optimizer.storages(p)[2], optimizer.parts(p)[2]).double()
    state = optimizer.state[p]
    kept: Tensor = state["exp_avg_sq"].double()
    return kept if "exp_avg_sq_scale" not in state else (kept * state["exp_avg_sq_scale"].double()).square()


@pytest.mark.filterwarnings("ignore:variant")
@pytest.mark.parametrize("beta2", [0.95, 0.999, 0.9995])
@pytest.mark.parametrize("name", KEPT)
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
