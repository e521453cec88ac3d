"""Small parameters share buffers for their state; nobody who saves, loads or freezes them may notice."""

import io
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lpconv.optim import LowPrecisionAdamW, base

SHAPES = [(3,), (64, 5), (), (7, 2, 3), (128,)]
VARIANTS = ["light", "plus", "kahan", "fp32-master", "light-int8", "int8-moment", "eco"]


def some_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.02).bfloat16()) for shape in SHAPES]


def make(params: list[nn.Parameter], variant: str = "plus") -> LowPrecisionAdamW:
    return LowPrecisionAdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, variant=variant, compiled=False)


def step(optimizer: LowPrecisionAdamW, params: list[nn.Parameter], seed: int, absent: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator).bfloat16()
        p.grad = None if i in absent else gradient
    optimizer.step()


def tensors(optimizer: LowPrecisionAdamW, params: list[nn.Parameter]) -> list[Tensor]:
    return [*params, *(t for p in params for t in optimizer.state[p].values())]


def assert_same(
    first: LowPrecisionAdamW, a: list[nn.Parameter], second: LowPrecisionAdamW, b: list[nn.Parameter]
) -> None:
    for x, y in zip(tensors(first, a), tensors(second, b), strict=True):
        assert torch.equal(x, y)
        assert x.shape == y.shape


@pytest.mark.parametrize("variant", VARIANTS)
def test_absent_gradients_leave_a_parameter_out(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As experts of a mixture: any of them may be missing in any step, the first included."""
    absent = [(2,), (), (0, 4), (1,), (), (0, 1, 2, 3), ()]
    a, b = some_params(), some_params()
    shared, alone = make(a, variant), make(b, variant)
    for seed, missing in enumerate(absent):
        step(shared, a, seed, missing)
    monkeypatch.setitem(base._LIMITS, "cpu", (-1, 0))
    for seed, missing in enumerate(absent):
        step(alone, b, seed, missing)
    assert_same(shared, a, alone, b)


def test_shared_buffers_fill_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU loads several numbers at once only from whole rows."""
    params, seen = some_params(), list[int]()
    optimizer = make(params)
    monkeypatch.setattr(optimizer, "_run_kernel", lambda job, step, parts, gradient: seen.append(len(gradient)))
    step(optimizer, params, 0)
    assert seen == [512]  # 494 in all
    assert {p.numel(): optimizer.state[p]["exp_avg"].shape for p in params} == {p.numel(): p.shape for p in params}


def test_one_kernel_call_serves_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    params = some_params()
    optimizer = make(params)
    step(optimizer, params, 0)
    storages = {optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() for p in params}
    assert len(storages) == 1
    run = Mock(wraps=optimizer._run_kernel)
    monkeypatch.setattr(optimizer, "_run_kernel", run)
    step(optimizer, params, 1)
    assert run.call_count == 1


@pytest.mark.parametrize(("device_type", "calls"), [("cpu", 6), ("cuda", 2)])
def test_a_gpu_steps_more_parameters_at_once(device_type: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device "meta", which computes nothing, with the limits of another."""
    monkeypatch.setitem(base._LIMITS, "meta", base._LIMITS[device_type])
    shapes = [(576,), (576, 1536), (192, 576), (1536, 576), (49152, 576), (576,), (576, 576)]
    params = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for shape in shapes]
    for p in params:
        p.grad = torch.empty_like(p)
    run = Mock()
    monkeypatch.setattr(LowPrecisionAdamW, "_run_kernel", run)
    make(params).step()
    assert run.call_count == calls


def test_saved_and_loaded_state_goes_on_bit_for_bit() -> None:
    params, saved = some_params(), io.BytesIO()
    optimizer = make(params)
    for seed in range(3):
        step(optimizer, params, seed)
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    loaded = make(twins)
    step(loaded, twins, 99)  # shares its own state before the other arrives
    for p, twin in zip(params, twins, strict=True):
        twin.data.copy_(p.detach())
    loaded.load_state_dict(torch.load(saved))
    for seed in range(3, 6):
        step(optimizer, params, seed)
        step(loaded, twins, seed)
    assert_same(optimizer, params, loaded, twins)


@pytest.mark.parametrize("largest_shared", [2**15, -1], ids=["shared", "alone"])
def test_loading_leaves_the_source_alone(largest_shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim keeps the tensors of the state dict as they are, so that two optimizers would step one state."""
    monkeypatch.setitem(base._LIMITS, "cpu", (largest_shared, 2**18))
    a, b = some_params(), some_params()
    first, second = make(a), make(b)
    step(first, a, 0)
    second.load_state_dict(first.state_dict())
    before = [t.clone() for p in a for t in first.state[p].values()]
    step(second, b, 1)
    assert all(torch.equal(x, y) for x, y in zip(before, (t for p in a for t in first.state[p].values()), strict=True))


def test_a_replaced_entry_is_used() -> None:
    params = some_params()
    optimizer = make(params)
    step(optimizer, params, 0)
    optimizer.state[params[0]]["exp_avg"] = torch.full((3,), 100.0, dtype=torch.bfloat16)
    before = params[0].detach().clone()
    step(optimizer, params, 1)
    assert float((params[0].detach() - before).abs().max()) > 1e-3  # a moment of 100 moves far
    assert float(optimizer.state[params[0]]["exp_avg"].min()) > 80


def test_parameters_that_are_not_contiguous() -> None:
    a, b = some_params()[1:2], some_params()[1:2]
    a[0].data = a[0].detach().t().contiguous().t()
    first, second = make(a), make(b)
    for seed in range(3):
        step(first, a, seed)
        step(second, b, seed)
    assert torch.equal(a[0], b[0])
