"""Linear layers that multiply as a recipe says, in place and with the parameters they had."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lpconv.kernels.linear import E5M2_LINEAR, FP16_LINEAR, linear, use_recipe
from lpconv.layers import linears


@pytest.mark.parametrize("recipe", [E5M2_LINEAR, FP16_LINEAR])
@pytest.mark.parametrize("layer", [nn.Linear(16, 8), nn.Linear(16, 8, bias=False), Conv1D(8, 16)])
def test_a_layer_multiplies_as_the_recipe_says(layer: nn.Module, recipe: object) -> None:
    model = nn.Sequential(copy.deepcopy(layer), nn.Linear(8, 4))
    before, kept = dict(model.named_parameters()), model[1]
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))

    use_recipe(model, recipe, keep=[kept])  # type: ignore[arg-type]  # of parametrize

    weight = before["0.weight"] if isinstance(layer, nn.Linear) else before["0.weight"].t()
    assert torch.equal(model[0](x), linear(x, weight, before.get("0.bias"), recipe=recipe))  # type: ignore[arg-type]
    assert dict(model.named_parameters()) == before
    assert type(kept) is nn.Linear
    assert [actual.is_replaceable for actual in linears(model)] == [False, True]
    assert torch.equal(copy.deepcopy(model)(x), model(x))
