"""float16 products on a CPU: computed in float32, rounded once."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpconv.kernels.linear import E5M2_LINEAR, E5M2_STOCHASTIC, linear
from lpconv.kernels.matmul import HalfProducts


@pytest.mark.parametrize(
    ("kind", "sizes", "shape"), [(nn.Linear, (300, 40), (8, 300)), (nn.Conv1d, (30, 8, 5), (2, 30, 16))]
)
def test_products_are_rounded_once_forward_and_backward(
    kind: type[nn.Module], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    layer, x = kind(*sizes).half(), torch.randn(shape).half().requires_grad_()
    with HalfProducts():
        out = layer(x)
        out.backward(torch.ones_like(out))
    wide = x.detach().float().requires_grad_()
    exact = copy.deepcopy(layer).float()(wide)
    exact.backward(torch.ones_like(exact))
    assert torch.equal(out, exact.half())
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.half())


@pytest.mark.parametrize("is_slow", [True, False])
def test_bfloat16_is_rounded_once_only_where_its_products_are_slow(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    slow = (torch.float16, torch.bfloat16) if is_slow else (torch.float16,)
    monkeypatch.setattr(sys.modules[HalfProducts.__module__], "_slow_dtypes", lambda: slow)
    a, b = (torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            computed.append((func, args[0].dtype))
            return func(*args, **(kwargs or {}))

    with Watch(), HalfProducts():
        out = a @ b
    products = [dtype for func, dtype in computed if func is torch.ops.aten.mm.default]
    assert products == [torch.float32 if is_slow else torch.bfloat16]
    assert torch.equal(out, (a.float() @ b.float()).bfloat16())


def test_wider_dtypes_are_left_alone() -> None:
    a = torch.randn(4, 4, dtype=torch.float64)
    with HalfProducts():
        assert (a @ a).dtype == torch.float64


def test_e5m2_gradients_overflow_to_inf_for_a_loss_scale_to_see() -> None:
    x, weight = torch.ones(2, 16, requires_grad=True), torch.ones(4, 16, requires_grad=True)
    linear(x, weight, recipe=E5M2_LINEAR).backward(torch.full((2, 4), 1e5))
    assert weight.grad is not None
    assert not weight.grad.isfinite().any()
    assert not linear(torch.full((2, 16), 1e5), weight, recipe=E5M2_LINEAR).isfinite().any()


def test_stochastic_rounding_is_right_on_average_and_only_where_gradients_are_wanted() -> None:
    """1.1 lies between the e5m2 numbers 1 and 1.25."""
    torch.manual_seed(0)
    x, weight = torch.full((4000, 1), 1.1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
    out = linear(x, weight, recipe=E5M2_STOCHASTIC)
    assert set(out.unique().tolist()) == {1.0, 1.25}
    assert abs(float(out.detach().mean()) - 1.1) < 5 * 0.1225 / 4000**0.5  # five standard errors
    out.backward(torch.full_like(out, 1.1))
    assert x.grad is not None
    assert abs(float(x.grad.mean()) - 1.1) < 5 * 0.1225 / 4000**0.5
    with torch.no_grad():
        assert linear(x, weight, recipe=E5M2_STOCHASTIC).unique().tolist() == [1.0]
