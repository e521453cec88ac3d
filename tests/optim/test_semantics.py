"""The optimizers mean what torch.optim means: options, groups, schedulers, closures, saving, loading."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lpconv.errors import InputError
from lpconv.optim import CollageAdamW, CollageLion, CollageSGD, LowPrecisionAdamW
from lpconv.optim.base import LowPrecisionOptimizer
from lpconv.optim.storage import VARIANTS

ADAMW_OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    {"maximize": True},
    {"lr": torch.tensor(0.02), "weight_decay": 0.0},
    {"betas": (0.0, 0.0)},
    {"lr": 0.0},
]
SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.5, "dampening": 0.3, "maximize": True},
    {"dampening": 0.3},
]


def weights(count: int = 300, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def train(make: Callable[[list[nn.Parameter]], Optimizer], start: Tensor, steps: int = 30) -> Tensor:
    p = nn.Parameter(start.clone())
    optimizer = make([p])
    for step in range(steps):
        p.grad = weights(p.numel(), seed=step + 1).bfloat16().to(p.dtype).view(p.shape)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [*((CollageAdamW, torch.optim.AdamW, o) for o in ADAMW_OPTIONS),
     *((CollageSGD, torch.optim.SGD, {"momentum": 0.0} | o) for o in SGD_OPTIONS)],
    ids=str,
)  # fmt: skip
def test_fp32_parameters_follow_torch(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    weights_of_ours = train(lambda ps: ours(ps, compiled=False, **options), weights())
    expected = train(lambda ps: theirs(ps, foreach=False, **options), weights())
    torch.testing.assert_close(weights_of_ours, expected, rtol=2e-6, atol=1e-6)


def test_lion_follows_its_formula() -> None:
    actual = train(lambda ps: CollageLion(ps, lr=0.01, weight_decay=0.1, compiled=False), weights())
    x, m = weights().double(), torch.zeros(300, dtype=torch.float64)
    for step in range(30):
        g = weights(seed=step + 1).bfloat16().double()
        x = x * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(actual.double(), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_parameters_follow_torch_at_bf16_accuracy(variant: str) -> None:
    start = weights().bfloat16()
    actual = train(lambda ps: LowPrecisionAdamW(ps, betas=(0.9, 0.95), variant=variant, compiled=False), start)
    wanted = train(lambda ps: torch.optim.AdamW(ps, betas=(0.9, 0.95), foreach=False), start.float())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), wanted, rtol=2e-2, atol=2e-2)


def test_bf16_sgd_and_lion_keep_small_updates() -> None:
    """Each update is 1/512 of an ulp of the weight, near the smallest that a pair holds; bf16 would stand still."""
    sgd, lion = (nn.Parameter(torch.full((10,), 1.5, dtype=torch.bfloat16)) for _ in range(2))
    for p, optimizer in (
        (sgd, CollageSGD([sgd], lr=2.0**-16, momentum=0.0, compiled=False)),
        (lion, CollageLion([lion], lr=2.0**-16, compiled=False)),
    ):
        for _ in range(2**10):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert torch.equal(p.detach(), torch.full_like(p, 1.5 - 2.0**-6))


def test_weight_decay_alone_is_not_rounded_away() -> None:
    p = nn.Parameter(torch.full((10,), 1.0, dtype=torch.bfloat16))
    optimizer = CollageAdamW([p], lr=1e-3, weight_decay=0.05, compiled=False)
    for _ in range(1000):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert float(p.detach()[0]) == pytest.approx((1 - 5e-5) ** 1000, rel=2**-8)


def test_groups_have_their_own_options_and_frozen_parameters_stay() -> None:
    a, b, frozen = (nn.Parameter(weights(50).bfloat16()) for _ in range(3))
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b, frozen], "lr": 0.0}]
    optimizer = CollageAdamW(groups, lr=0.1, compiled=False)
    before = a.detach().clone()
    for p in (a, b):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(a, before)
    assert torch.equal(b, before)
    assert torch.equal(frozen, before)
    assert frozen not in optimizer.state
    optimizer.add_param_group({"params": [nn.Parameter(weights(5).bfloat16())], "weight_decay": 0.5})
    assert optimizer.param_groups[2]["weight_decay"] == 0.5


def test_schedulers_and_closures() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = CollageAdamW([p], lr=1.0, compiled=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p.float() ** 2).sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("shape", [(), (0,), (7, 5), (2, 3, 4, 4)])
def test_any_shape_and_stride(shape: tuple[int, ...]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    flat = train(lambda ps: CollageAdamW(ps, compiled=False), start.reshape(-1))
    shaped = train(lambda ps: CollageAdamW(ps, compiled=False), start)
    assert torch.equal(shaped.reshape(-1), flat)
    if len(shape) == 4:
        strided = train(lambda ps: CollageAdamW(ps, compiled=False), start.to(memory_format=torch.channels_last))
        assert torch.equal(strided, shaped)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_an_unbroken_one(variant: str, tmp_path: Any) -> None:
    def fresh() -> tuple[nn.Parameter, LowPrecisionOptimizer]:
        p = nn.Parameter(weights().bfloat16())
        return p, LowPrecisionAdamW([p], betas=(0.9, 0.95), variant=variant, compiled=False)

    def run(p: nn.Parameter, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            p.grad = weights(seed=step).bfloat16()
            optimizer.step()

    unbroken, whole = fresh()
    run(unbroken, whole, range(20))
    first, optimizer = fresh()
    run(first, optimizer, range(10))
    torch.save({"p": first.detach(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")

    saved = torch.load(tmp_path / "state.pt")
    second, optimizer = fresh()
    second.data.copy_(saved["p"])
    optimizer.load_state_dict(saved["optimizer"])
    run(second, optimizer, range(10, 20))
    assert torch.equal(second, unbroken)
    for name, value in whole.state[unbroken].items():
        assert torch.equal(optimizer.state[second][name], value), name
        assert optimizer.state[second][name].dtype == value.dtype, name


def test_a_deep_copy_goes_on_like_the_original() -> None:
    p = nn.Parameter(weights().bfloat16())
    optimizer = CollageAdamW([p], compiled=False)
    for step in range(3):
        p.grad = weights(seed=step).bfloat16()
        optimizer.step()
    twin = copy.deepcopy(optimizer)
    copied = twin.param_groups[0]["params"][0]
    copied.grad = p.grad
    optimizer.step()
    twin.step()
    assert copied is not p
    assert torch.equal(copied, p)
    assert torch.equal(twin.state[copied]["residual"], optimizer.state[p]["residual"])


def test_state_of_another_variant_is_refused() -> None:
    p = nn.Parameter(weights().bfloat16())
    p.grad = torch.ones_like(p)
    light, plus = (CollageAdamW([p], betas=(0.9, 0.95), variant=v, compiled=False) for v in ("light", "plus"))
    light.step()
    plus.step()
    kept = plus.state[p]["exp_avg_sq_residual"]
    with pytest.raises(InputError, match="fit") as caught:
        plus.load_state_dict(copy.deepcopy(light.state_dict()))
    assert caught.value.hint
    assert plus.state[p]["exp_avg_sq_residual"] is kept


def test_state_of_parameters_in_another_order_is_refused() -> None:
    params = [nn.Parameter(weights(n).bfloat16()) for n in (6, 8)]
    optimizer, other = (CollageAdamW(order, compiled=False) for order in (params, params[::-1]))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(InputError, match=r"6") as caught:
        other.load_state_dict(optimizer.state_dict())
    assert "order" in caught.value.hint


def test_fp32_state_for_bf16_weights() -> None:
    p = nn.Parameter(weights().bfloat16())
    optimizer = CollageAdamW([p], state_dtype=torch.float32, compiled=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state[p]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "residual"}
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize(
    ("variant", "expected"),
    [("light", 10), ("plus", 12), ("full", 14), ("bf16", 8), ("stochastic", 8), ("kahan", 10), ("fp32-moments", 12),
     ("fp32-master", 16), ("light-int8", 9), ("int8-moment", 8), ("eco", 8)],
)  # fmt: skip
def test_bytes_per_parameter_by_formula_and_measured(variant: str, expected: int) -> None:
    p = nn.Parameter(weights().bfloat16())
    optimizer = LowPrecisionAdamW([p], betas=(0.9, 0.95), variant=variant, compiled=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert VARIANTS[variant].bytes_per_parameter() == expected
    assert optimizer.bytes_per_parameter() == expected


def test_gradients_may_be_fp32_and_accumulate() -> None:
    start = weights().bfloat16()
    p = nn.Parameter(start.clone())
    torch.autograd.backward((p.float() * weights(seed=5)).sum())
    torch.autograd.backward((p.float() * weights(seed=6)).sum())
    optimizer = CollageAdamW([p], lr=0.1, compiled=False)
    optimizer.step()
    moved = p.detach().float() - start.float()
    gradient = weights(seed=5) + weights(seed=6)
    assert float((moved.sign() == -gradient.sign()).double().mean()) > 0.98
