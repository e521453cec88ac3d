"""Betas and eps that a schedule changes during a run, as OneCycleLR does, give torch.optim.AdamW's steps."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lpconv.optim import LowPrecisionAdamW

SIZE, STEPS = 4096, 20

SCHEDULES: dict[str, Callable[[int], dict[str, object]]] = {
    "beta2 falls": lambda i: {"betas": (0.9, 0.999 if i < STEPS // 2 else 0.95)},
    "beta2 rises": lambda i: {"betas": (0.9, 0.95 if i < STEPS // 2 else 0.999)},
    "beta1 as in OneCycleLR": lambda i: {"betas": (0.95 - 0.01 * min(i, STEPS - i), 0.999)},
    "eps": lambda i: {"eps": 1e-8 if i < STEPS // 2 else 0.1},
}


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(SIZE, generator=generator)
    return [(common + torch.randn(SIZE, generator=generator)).bfloat16() for _ in range(STEPS)]


def train(optimizer: torch.optim.Optimizer, p: nn.Parameter, schedule: Callable[[int], dict[str, object]]) -> Tensor:
    for i, gradient in enumerate(gradients()):
        optimizer.param_groups[0].update(schedule(i))
        p.grad = None if i % 7 == 6 else gradient.to(p.dtype)  # a step without a gradient keeps the last scale
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return p.detach().float()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("variant", ["int8-moment", "full"])
def test_a_schedule_of_betas_and_eps_is_followed(variant: str, name: str) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.0}
    plain, ours = (nn.Parameter(torch.zeros(SIZE, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    expected = train(torch.optim.AdamW([plain], **options), plain, SCHEDULES[name])

    got = train(LowPrecisionAdamW([ours], variant=variant, compiled=False, **options), ours, SCHEDULES[name])

    assert float((got - expected).norm() / expected.norm()) < 0.012


def test_a_state_of_an_older_version_is_continued() -> None:
    first, second = (nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16)) for _ in range(2))
    a, b = (LowPrecisionAdamW([p], variant="int8-moment", compiled=False) for p in (first, second))
    first.grad = second.grad = gradients()[0]
    a.step()
    saved = copy.deepcopy(a.state_dict())
    del saved["state"][0]["ratio_scale"]
    second.data.copy_(first)
    b.load_state_dict(saved)
    for optimizer in (a, b):
        optimizer.step()
    torch.testing.assert_close(second, first, rtol=0, atol=2.0**-20)
