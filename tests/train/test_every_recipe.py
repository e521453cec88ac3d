"""What every recipe must prove: `RECIPES` is gone through, each trained for one step of the embedded model."""

import math
from pathlib import Path

import pytest
import torch

import lpconv.hf
from lpconv.init import InitOptions, init
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import RECIPES, arithmetic
from lpconv.train.run import finetune


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_and_what_it_publishes_opens(recipe: str, shallow: Path, tmp_path: Path) -> None:
    options = FinetuneOptions(
        arithmetic=arithmetic(recipe=recipe), steps=1, batch_size=1, seq_len=16, eval_batches=1, twin="none",
        lr=1e-3, warmup=0.0, grad_accum=2, gradient_checkpointing=True,
    )  # fmt: skip
    start = shallow
    if options.arithmetic.is_native:  # which a trained model is refused to
        start = tmp_path / "fresh"
        init("demo", start, InitOptions(reinit=True, layers=1))
    result = finetune(str(start), tmp_path / "out", options)

    (run,) = result.runs
    assert result.recipe == recipe
    assert all(math.isfinite(loss) for loss in run.losses.values)
    tuned = lpconv.hf.load(tmp_path / "out", dtype=torch.float32).state_dict()
    before = lpconv.hf.load(start, dtype=torch.float32).state_dict()
    assert tuned.keys() == before.keys()
    assert all(bool(x.isfinite().all()) for x in tuned.values())
    moved = [name for name, x in tuned.items() if not torch.equal(x, before[name])]
    assert moved or run.num_skipped  # a loss scale that began too high
    assert all(bool(((tuned[name] - x).abs() <= 0.01 + x.abs() / 8).all()) for name, x in before.items())
