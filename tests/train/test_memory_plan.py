"""What a sharded step needs, found on a model without memory: sizes that one can add up by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.errors import UnsupportedError, UsageError
from lpconv.results import RecipeMemory
from lpconv.scaled import saved_bytes
from lpconv.train.memory import keep_only_inputs
from lpconv.train.memory_plan import Passes, keeping_inputs, passes_of, recipe_memory, smallest_world
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import prepare
from lpconv.train.recipes import RECIPES
from lpconv.train.run import plan


@pytest.fixture(scope="module")
def empty() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


NONE = Passes(activations=0, block_activations=0, num_tokens=0, num_logits=0)
TABLE, BLOCK = 100 * 16, 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
ALL = 2 * TABLE + 16 + 3 * BLOCK


@pytest.mark.parametrize(
    ("recipe", "weight", "state"), [("fp32", 4, 8), ("unit-fp8", 4, 8), ("scalify-fp8", 4, 4), ("bf16", 2, 4),
                                    ("collage-bf16", 2, 8), ("unit-fp8-collage", 2, 8)],
)  # fmt: skip
def test_weights_and_state_are_shared_out(recipe: str, weight: int, state: int, empty: Any) -> None:
    for num_ranks in (2, 4):
        parts = memory(empty, recipe, num_ranks, NONE).parts
        assert parts["weights"] == weight * ALL // num_ranks
        assert parts["optimizer"] == state * ALL // num_ranks
    # Rows are not torn: 100 over 64 ranks are 2 each at most, and every vector has an element.
    assert memory(empty, recipe, 128, NONE).parts["weights"] > weight * ALL // 128
    # Alone, scaled weights have 16 bits, and lie beside a copy in fp32 where there is one.
    alone = memory(empty, recipe, 1, NONE).parts
    assert alone["gathered"] == 0
    assert alone["weights"] == (4 if recipe == "fp32" else 2) * ALL
    assert alone["weights"] + alone["optimizer"] >= (weight + state) * ALL


def test_the_peak_is_where_most_is(empty: Any) -> None:
    rest, own = 2 * TABLE + 16, BLOCK // 2
    # Of the loss: the last block's buffer waits for the model to return.
    found = memory(empty, "fp32", 2, replace(NONE, activations=10**9, num_logits=10**6)).parts
    assert (found["activations"], found["gathered"], found["logits"]) == (10**9, 4 * (rest + BLOCK), 8 * 10**6)
    # Of the last block's backward pass: two blocks are gathered, the head has its gradient.
    found = memory(empty, "fp32", 2, replace(NONE, activations=10**9, num_tokens=7, block_activations=10**8)).parts
    assert (found["gathered"], found["gradients"]) == (4 * (rest + 2 * BLOCK), 4 * TABLE)
    assert found["temporary"] == 4 * 16 * 32 + 2 * 4 * 7 * 32
    # Of the block before it, where the last one's activations are few and its sums are on their way.
    found = memory(empty, "fp32", 2, replace(NONE, activations=10**9, num_tokens=7)).parts
    assert found["gradients"] == 4 * TABLE + 4 * own + 4 * BLOCK
    # Of the first block, where rows of gradients are more than a block's activations.
    found = memory(like(empty, num_hidden_layers=40), "fp32", 2, replace(NONE, num_tokens=7)).parts
    assert (found["gathered"], found["activations"]) == (4 * (rest + 2 * BLOCK), 0)
    assert found["gradients"] == 4 * TABLE + 39 * 4 * own + 4 * BLOCK
    # Of the end, where blocks are little beside the tables.
    rest = 2 * 5000 * 16 + 16
    found = memory(like(empty, num_hidden_layers=1, vocab_size=5000), "fp32", 2, NONE).parts
    assert (found["gathered"], found["gradients"]) == (0, 4 * own + 8 * rest + 4 * rest // 2)


@pytest.mark.parametrize(("recipe", "per_number"), [("bf16", 6), ("unit-fp8", 8), ("scalify-fp8", 14)])
def test_a_table_that_is_the_head_too_has_two_gradients_and_their_sum(recipe: str, per_number: int, empty: Any) -> None:
    """Scaled ones are widened to fp32 for the sum, where scales that follow the data differ."""
    tied = like(empty, num_hidden_layers=1, vocab_size=5000, tie_word_embeddings=True)
    found = memory(tied, recipe, 2, NONE).parts
    weight = 2 if recipe == "bf16" else 4
    assert found["gradients"] == weight * BLOCK // 2 + 4 * BLOCK + per_number * 5000 * 16


def like(model: Any, **settings: Any) -> Any:
    config = transformers.LlamaConfig(**model.config.to_dict() | settings)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("recipe", ["fp32", "amp-bf16", "amp-fp16", "adaptive-fp16", "bf16", "unit-fp16", "unit-fp8"])
def test_activations_counted_without_memory_are_those_of_a_model(recipe: str, empty: Any) -> None:
    """Attention may keep a copy more. Under autocast they hold the weights' 16-bit copies."""
    arithmetic = RECIPES[recipe].arithmetic
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(empty.config).train()
    prepared = prepare(model, arithmetic, FinetuneOptions(arithmetic=arithmetic), seed=0)
    ids = torch.zeros((1, 64), dtype=torch.long)
    with prepared.around_forward("cpu"):
        real = saved_bytes(prepared.model, {"input_ids": ids, "labels": ids})
    counted = passes_of(empty, arithmetic, (1, 64))
    assert counted.num_logits == 6400
    assert real <= counted.activations <= 1.1 * real
    keep_only_inputs(model)
    with prepared.around_forward("cpu"):
        inputs = saved_bytes(prepared.model, {"input_ids": ids, "labels": ids})
    assert 0.99 * inputs <= keeping_inputs(counted, empty, arithmetic).activations <= 1.25 * inputs
    assert all(p.is_meta for p in empty.parameters())
    assert {p.dtype for p in empty.parameters()} == {torch.float32}


def test_the_smallest_number_of_ranks_has_room_and_half_of_it_has_not() -> None:
    rows = [RecipeMemory(recipe="fp32", num_ranks=n, parts={"weights": 80 // n, "activations": 10}) for n in (1, 2, 4)]
    assert smallest_world(rows, {"a": 30, "b": 29, "c": 1000}) == {"a": 4, "b": None, "c": 1}


def test_a_large_model_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}
    settings["use_cache"] = False  # as in many checkpoints
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for model, room, count in ((tmp_path, "5TB", 1), (tmp_path / "config.json", "1GB", None)):
        done = CliRunner().invoke(app, ["finetune", str(model), "--dry-run", "--max-memory", room, "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["num_parameters"] > 8e9
        assert found["gpus"]["unit-fp8"]["--max-memory"] == count
        assert found["gpus"]["unit-fp8"]["h100"] in (1, 2, 4)
        assert found["gpus"]["unit-fp8"]["t4/rtx4080"] > found["gpus"]["unit-fp8"]["rtx3090/4090"]
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="`lpconv init`"):
        plan("llama-8b", FinetuneOptions(arithmetic=RECIPES["native-fp8"].arithmetic))
    with pytest.raises(UnsupportedError, match="classification"):
        plan("bert-base", FinetuneOptions(arithmetic=RECIPES["fp32"].arithmetic, task="classification"))
    with pytest.raises(UsageError, match="8192 positions"):
        plan("llama-8b", FinetuneOptions(arithmetic=RECIPES["fp32"].arithmetic, seq_len=9000))


def memory(empty: Any, recipe: str, num_ranks: int, passes: Passes) -> RecipeMemory:
    return recipe_memory(empty, RECIPES[recipe].arithmetic, num_ranks=num_ranks, passes=passes)
