"""Recipes and the combinations that cannot be."""

from typing import Any

import pytest

from lpconv.errors import UsageError
from lpconv.loss_scale import LOSS_SCALES as RULES
from lpconv.optim.storage import VARIANTS
from lpconv.train.recipes import LOSS_SCALES, RECIPES, TRAINING_OPTIMIZERS, arithmetic, saved_as


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_possible_and_keeps_its_name(name: str) -> None:
    found = arithmetic(recipe=name)
    assert found == RECIPES[name].arithmetic
    assert found.name == name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"precision": "fp4"}, "`nvfp4`"),
        ({"precision": "fp4", "operand_scale": "row"}, "`fp4 adamw row`"),
        ({"precision": "fp4", "optimizer": "eco"}, "`fp4 eco nvfp4`"),
        ({"recipe": "unit-nvfp4", "operand_scale": "row"}, "`fp4 unit adamw row`"),
        ({"recipe": "unit-fp8", "operand_scale": "max"}, "`unit-fp8 max`"),
        ({"precision": "fp8"}, "`fp8 adamw dynamic`"),
        ({"precision": "fp8", "rounding": "stochastic"}, "`fp8 adamw dynamic stochastic`"),
        ({"precision": "fp16", "loss_scale_floor": "8"}, "`amp-fp16 floor 8`"),
        ({"recipe": "mpt-fp8", "loss_scale_floor": "8"}, "`fp8 fp16-weights dynamic floor 8 stochastic`"),
        ({"precision": "bf16", "optimizer": "bf16", "rounding": "stochastic"}, "`bf16-sr`"),
        ({"recipe": "bf16-sr", "rounding": "nearest"}, "`bf16`"),
        ({"recover": True, "precision": "fp32"}, "`recover fp32`"),
    ],
)
def test_names_of_combinations(asked: dict[str, Any], name: str) -> None:
    assert f"`{arithmetic(**asked).name}`" == name


@pytest.mark.parametrize("name", TRAINING_OPTIMIZERS)
def test_every_optimizer_trains_in_some_precision_and_counts_its_bytes(name: str) -> None:
    chosen = TRAINING_OPTIMIZERS[name]
    method = "unit" if chosen.needs_scales else "none"
    assert arithmetic(precision="bf16", method=method, optimizer=name).optimizer == name
    if chosen.variant is not None:
        assert chosen.bytes_per_parameter == VARIANTS[chosen.variant].bytes_per_parameter()


def test_every_loss_scale_is_a_rule_or_works_inside_the_model() -> None:
    assert set(LOSS_SCALES) - {"adaptive"} == set(RULES) - {"constant"}  # a constant is given as a number


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"method": "unit", "loss_scale": "dynamic"}, "`unit`.*scale"),
        ({"recipe": "scalify-fp8", "loss_scale": "adaptive"}, "`scalify`.*scale"),
        ({"precision": "fp32", "optimizer": "collage-plus"}, "needs bf16 weights"),
        ({"precision": "fp16", "method": "unit", "optimizer": "bf16"}, "needs bf16 weights"),
        ({"precision": "fp8", "loss_scale": "adaptive"}, "needs fp16 or bf16 gradients"),
        ({"precision": "bf16", "loss_scale": "adaptive", "optimizer": "bf16"}, "keeps bf16 weights"),
        ({"precision": "bf16", "optimizer": "fp16-state"}, "none .*scales"),
        ({"recipe": "collage-bf16", "rounding": "stochastic"}, "stochastic"),
        ({"recipe": "unit-fp8", "loss_scale_floor": "8"}, "floor"),
        ({"precision": "fp16", "loss_scale": "-3"}, "`-3`"),
        ({"recipe": "native-fp8", "optimizer": "collage-plus"}, "updates unit-scale weights"),
        ({"recipe": "unit-fp8", "optimizer": "fp16-weights"}, "`fp16-weights`.* unit "),
        ({"recipe": "unit-fp9"}, "`unit-fp9`"),
        ({"recipe": "unit-fp8", "operand_scale": "nvfp4"}, "`nvfp4`"),
        ({"recipe": "nvfp4", "operand_scale": "nvfp4-static"}, "`nvfp4-static`"),
    ],
)
def test_impossible_combinations_are_refused_with_the_reason(asked: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        arithmetic(**asked)
    assert caught.value.hint


def test_fp16_takes_the_dynamic_scale_unless_another_is_named() -> None:
    assert arithmetic(precision="fp16").loss_scale == "dynamic"
    assert arithmetic(precision="fp16", loss_scale="1024").loss_scale == "1024"
    assert arithmetic(precision="fp16", method="unit").loss_scale == "none"


def test_blocks_need_no_loss_scale_and_fp4_has_a_usual_scale() -> None:
    assert arithmetic(precision="fp4") == arithmetic(recipe="nvfp4")
    assert arithmetic(precision="fp8", operand_scale="mx") == arithmetic(recipe="mxfp8")
    assert arithmetic(precision="fp4", method="unit", operand_scale="row").operand_scale == "row"
    assert arithmetic(recipe="nvfp4", optimizer="collage-plus").variant == "plus"


def test_the_published_form_holds_what_training_kept() -> None:
    assert saved_as(arithmetic(recipe="unit-fp8")) == ("unit", "e4m3fn")
    assert saved_as(arithmetic(recipe="native-fp8")) == ("unit", "e4m3fn")
    assert saved_as(arithmetic(recipe="unit-fp8-collage")) == ("collage", "bf16")
    assert saved_as(arithmetic(recipe="bf16-sr")) == ("plain", "bf16")
    assert saved_as(arithmetic(recipe="amp-fp16")) == ("plain", "fp32")
