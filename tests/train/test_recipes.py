"""Recipes and the combinations that cannot be."""

import pytest

from lpconv.errors import UsageError
from lpconv.train.recipes import RECIPES, arithmetic, saved_as


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_possible_and_keeps_its_name(name: str) -> None:
    found = arithmetic(recipe=name)
    assert found == RECIPES[name].arithmetic
    assert found.name == name


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"method": "unit", "loss_scale": "dynamic"}, "would be undone"),
        ({"recipe": "scalify-fp8", "loss_scale": "adaptive"}, "would be undone"),
        ({"precision": "fp32", "optimizer": "collage-plus"}, "keeps bf16 weights"),
        ({"precision": "fp16", "method": "unit", "optimizer": "bf16"}, "keeps bf16 weights"),
        ({"precision": "fp8", "loss_scale": "adaptive"}, "in 16 bits"),
        ({"precision": "bf16", "loss_scale": "adaptive", "optimizer": "bf16"}, "keeps bf16 ones"),
        ({"precision": "bf16", "optimizer": "fp16-state"}, "method none has none"),
        ({"recipe": "collage-bf16", "rounding": "stochastic"}, "has no place"),
        ({"recipe": "unit-fp8", "loss_scale_floor": "8"}, "has no floor"),
        ({"precision": "fp16", "loss_scale": "-3"}, "unknown loss scale"),
        ({"recipe": "unit-fp9"}, "unknown recipe"),
    ],
)
def test_impossible_combinations_are_refused_with_the_reason(asked: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        arithmetic(**asked)
    assert caught.value.hint


def test_stochastic_rounding_belongs_to_the_optimizer_that_keeps_nothing_else() -> None:
    assert arithmetic(precision="bf16", optimizer="bf16", rounding="stochastic") == arithmetic(recipe="bf16-sr")
    assert arithmetic(recipe="bf16-sr", rounding="nearest") == arithmetic(recipe="bf16")


def test_fp16_takes_the_dynamic_scale_unless_another_is_named() -> None:
    assert arithmetic(precision="fp16").loss_scale == "dynamic"
    assert arithmetic(precision="fp16", loss_scale="1024").loss_scale == "1024"
    assert arithmetic(precision="fp16", method="unit").loss_scale == "none"


def test_the_published_form_holds_what_training_kept() -> None:
    assert saved_as(arithmetic(recipe="unit-fp8")) == ("unit", "e4m3fn")
    assert saved_as(arithmetic(recipe="unit-fp8-collage")) == ("collage", "bf16")
    assert saved_as(arithmetic(recipe="bf16-sr")) == ("plain", "bf16")
    assert saved_as(arithmetic(recipe="amp-fp16")) == ("plain", "fp32")
