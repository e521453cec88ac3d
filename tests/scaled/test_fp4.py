"""Scaled tensors whose operands have four bits, or scales per block."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lpconv.kernels.linear import FP4_RECIPES, FP8_RECIPES, LinearRecipe, use_recipe
from lpconv.scaled import ScaledTensor, scaled, scaling_of
from lpconv.scaled.operands import operand_cast
from lpconv.scaled.pair import Role


def layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 8))  # the last one is a head, which stays wide


def exact_modules(model: nn.Module) -> list[str]:
    """Names of the parameters that stay in the carrier dtype."""
    return [n for n, p in model.named_parameters() if isinstance(p, ScaledTensor) and p.role is Role.EXACT]


@pytest.mark.parametrize(
    ("compute", "kind", "recipe"),
    [("fp4", "nvfp4", FP4_RECIPES["nvfp4"]), ("fp4", "mx", FP4_RECIPES["mx"]), ("fp8", "mx", FP8_RECIPES["mx"])],
)
def test_products_are_those_of_plain_linear_layers(compute: str, kind: str, recipe: LinearRecipe) -> None:
    exact, x = layer(), torch.randn(40, 64)
    plain = copy.deepcopy(exact)
    ours = scaled(copy.deepcopy(exact), compute=compute, operand_scale=kind, carrier=torch.float32)
    use_recipe(plain, recipe, keep=[plain[1]])

    outputs = [model(x) for model in (ours, plain, exact)]
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[2], rtol=1e-3, atol=1e-3)

    for out in outputs:
        out.square().sum().backward()
    gradient, expected = ours[0].weight.grad.dequantize(), exact[0].weight.grad
    assert 0.01 < float((gradient - expected).norm() / expected.norm()) < 0.3
    assert (scaling_of(ours).saved is None) == (compute == "fp4" or kind == "mx")  # type: ignore[union-attr]  # scaled


def test_roles_choose_the_cast() -> None:
    recipe = FP4_RECIPES["nvfp4"]
    assert operand_cast("e2m1", "nvfp4", Role.WEIGHT) == recipe.weight
    assert operand_cast("e2m1", "nvfp4", Role.GRADIENT) == recipe.gradient
    assert operand_cast("e2m1", "nvfp4", Role.ACTIVATION, rotated=True) == recipe.grad_weight_casts[0]


def test_the_last_blocks_stay_wide() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(7))

        def forward(self, x: Tensor) -> Tensor:
            for each in self.layers:
                x = each(x)
            return x

    model = scaled(Blocks(), compute="fp4", operand_scale="mx")
    assert exact_modules(model) == ["layers.6.weight", "layers.6.bias"]
    assert bool(model(torch.randn(2, 16)).isfinite().all())
