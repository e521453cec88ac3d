"""Linears under every fp8 recipe: near the plain Linear, small in what they save, MX blocks as specified."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from lpconv.errors import UsageError
from lpconv.kernels.linear import FP8_RECIPES, Multiplying, calibrate, use_recipe
from tests.helpers.block_reference import cast_blocks

# ‖y - ŷ‖/‖y‖ of a product of two operands rounded to 3 (gradients: 2) bits of mantissa; mx lets the largest saturate.
OUTPUT, GRADIENT = 0.09, 0.14


def small_model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64, bias=bias), nn.GELU(), nn.Linear(64, 48, bias=bias))


def multiplying(layer: nn.Linear, recipe: str) -> nn.Linear:
    use_recipe(layer, FP8_RECIPES[recipe])
    return layer


def converted(model: nn.Module, recipe: str, x: Tensor) -> nn.Module:
    ours = copy.deepcopy(model)
    assert use_recipe(ours, FP8_RECIPES[recipe]) == ["0", "2"]

    def step() -> None:
        ours(x).square().mean().backward()

    calibrate(ours, step)
    step()  # delayed scaling needs a history
    ours.zero_grad()
    x.grad = None
    return ours


def relative(x: Tensor, x_hat: Tensor | None) -> float:
    assert x_hat is not None
    return float((x - x_hat).detach().norm() / x.detach().norm())


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 300.0])  # unit scaling finds its scale as well as amax does
def test_outputs_and_gradients_stay_within_the_format(recipe: str, dtype: torch.dtype, spread: float) -> None:
    plain = small_model().to(dtype)
    x = (spread * torch.randn(40, 96)).to(dtype).requires_grad_()
    y = plain(x)
    y.square().mean().backward()
    expected = x.grad
    assert expected is not None
    x.grad = None
    ours = converted(plain, recipe, x)

    y_hat = ours(x)
    y_hat.square().mean().backward()

    assert y_hat.dtype == dtype
    assert relative(y, y_hat) < OUTPUT
    assert relative(expected, x.grad) < GRADIENT
    for name, parameter in plain.named_parameters():
        actual = ours.get_parameter(name).grad
        assert actual is not None
        assert actual.dtype == dtype
        assert relative(parameter.grad, actual) < GRADIENT, name  # type: ignore[arg-type]  # it has one: see above


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("rows", [1, 7, 33])  # no multiple of 16 or of a block
def test_rows_may_be_any_number(recipe: str, rows: int) -> None:
    x = torch.randn(rows, 96, requires_grad=True)
    ours = converted(small_model(bias=False), recipe, x)

    ours(x.view(1, rows, 96)).sum().backward()

    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_frozen_layer_gives_the_same_output_from_a_quarter_of_the_bytes(recipe: str) -> None:
    x = torch.randn(40, 96)
    ours = converted(small_model(), recipe, x)
    with torch.no_grad():
        expected = ours(x)
        for module in ours.modules():
            if isinstance(module, Multiplying):
                module.freeze()
        actual = ours(x)

    assert torch.equal(actual, expected)
    codes = [p for p in ours.parameters() if p.dtype == torch.float8_e4m3fn]
    assert sum(p.numel() for p in codes) == 96 * 64 + 64 * 48
    assert sum(p.numel() for p in ours.parameters()) - sum(p.numel() for p in codes) == 64 + 48  # the biases


def test_codes_are_saved_in_place_of_inputs() -> None:
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    layer = multiplying(nn.Linear(96, 48, bias=False, dtype=torch.bfloat16), "static")
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)

    own = [t for t in saved if t is not layer.weight and t.numel() > 1]
    assert sum(t.numel() * t.element_size() for t in own) == x.numel() + layer.weight.numel()  # the latter on a CPU


def test_mx_blocks_are_those_of_the_specification() -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(8, 64) * torch.logspace(-3, 3, 64), multiplying(nn.Linear(64, 32, bias=False), "mx")

    w = cast_blocks(layer.weight.detach(), "mxfp8_e4m3")
    expected = cast_blocks(x, "mxfp8_e4m3").float() @ w.float().t()

    assert torch.equal(layer(x), expected)


def test_layers_that_read_one_tensor_share_its_scale() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)  # type: ignore[no-any-return]

    model = Fork()
    use_recipe(model, FP8_RECIPES["static"])

    calibrate(model, lambda: model(torch.randn(4, 32)))

    assert model.a.input_state is model.b.input_state


def test_a_compiler_casts_the_input_of_two_layers_once() -> None:
    """Equal parts of a graph are merged only without constants like NaN, which does not equal itself."""
    torch._dynamo.reset()  # numbers that changed in other tests would be symbols here
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    one, two = (multiplying(nn.Linear(32, 32).bfloat16(), "tensor") for _ in range(2))
    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch.compile(lambda x: one(x) + two(x), backend=backend, fullgraph=True)(torch.randn(32, 32).bfloat16())
    casts = [n for n in graphs[0].graph.nodes if n.kwargs.get("dtype") == torch.float8_e4m3fn]
    assert len(casts) == 3  # of the input, once, and of two weights


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_second_derivative_is_an_error_not_zero(recipe: str) -> None:
    x = torch.randn(4, 96, requires_grad=True)
    (grad,) = torch.autograd.grad(multiplying(nn.Linear(96, 64), recipe)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.square().sum().backward()


def test_what_is_not_finite_cannot_be_calibrated() -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    use_recipe(model, FP8_RECIPES["static"])
    with pytest.raises(UsageError, match="finite"):
        calibrate(model, lambda: model(torch.full((4, 32), float("inf"))))


def test_conv1d_is_a_linear_with_its_weight_turned() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    plain = nn.Sequential(Conv1D(48, 64))
    ours = copy.deepcopy(plain)
    x = torch.randn(40, 64)

    assert use_recipe(ours, FP8_RECIPES["tensor"]) == ["0"]

    assert relative(plain(x), ours(x)) < OUTPUT
