"""A training step of a Linear in fp8 beside torchao's layer of the same recipe, emulated on the CPU."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpconv.kernels.linear import FP8_RECIPES, linear

M, K, N = 64, 128, 96


def step(layer: Any, weight: Tensor) -> list[Tensor]:
    """Output, input gradient and weight gradient, with one input of 40 among N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator).bfloat16()
    x[3, 5] = 40.0
    gradient = torch.randn(M, N, generator=generator).bfloat16()
    x.requires_grad_()
    y = layer(x)
    y.backward(gradient)
    return [t.detach().double() for t in (y, x.grad, weight.grad)]


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16())


def ours(recipe: str) -> list[Tensor]:
    w = weight()
    return step(lambda x: linear(x, w, recipe=FP8_RECIPES[recipe]), w)


def exact() -> list[Tensor]:
    w = weight()
    return step(lambda x: nn.functional.linear(x.double(), w.double()), w)


def decibels(actual: Tensor, reference: Tensor) -> float:
    return float(10 * torch.log10(reference.square().sum() / (actual - reference).square().sum()))


def plain() -> nn.Sequential:
    layer = nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    layer.weight = weight()
    return nn.Sequential(layer)


@pytest.mark.parametrize(("recipe", "theirs"), [("tensor", "tensorwise"), ("row", "rowwise")])
def test_the_three_products_are_torchaos(recipe: str, theirs: str) -> None:
    """To bf16 roundings of results, and codes that flip where 448/amax and 1/(amax/448) differ in the last bit."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(theirs)
    # torchao rounds scales of rows to powers of two; ours are exact.
    config = dataclasses.replace(config, emulate=True, round_scales_to_power_of_2=False)
    model = convert_to_float8_training(plain(), config=config)

    expected = step(model, model[0].weight)

    assert all(decibels(a, b) > 47 for a, b in zip(ours(recipe), expected, strict=True))


def test_mx_loses_as_much_as_torchaos() -> None:
    """Its blocks round scales up (RCEIL), ours down as the specification has it, which lets the largest saturate."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    model = plain()
    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))

    theirs = step(model, model[0].weight)

    for actual, their, true in zip(ours("mx"), theirs, exact(), strict=True):
        assert decibels(actual, true) == pytest.approx(decibels(their, true), abs=1)
        assert decibels(actual, their) > 33
