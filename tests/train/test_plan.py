"""What a sharded step needs, found on a model without memory: sizes that one can add up by hand."""

from typing import Any

import pytest
import torch
import transformers

from lpconv.train.plan import Passes, passes_of, recipe_memory, smallest_world


@pytest.fixture(scope="module")
def empty() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


TABLE, BLOCK = 100 * 16, 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
ALL = 2 * TABLE + 16 + 3 * BLOCK


@pytest.mark.parametrize(
    ("recipe", "weight", "state"), [("fp32", 4, 8), ("unit-fp8", 4, 8), ("scalify-fp8", 4, 4), ("bf16", 2, 4),
                                    ("collage-bf16", 2, 8), ("unit-fp8-collage", 2, 8)],
)  # fmt: skip
def test_weights_and_state_are_shared_out(recipe: str, weight: int, state: int, empty: Any) -> None:
    none = Passes(activations=0, num_logits=0)
    for num_ranks in (1, 2, 4):
        parts = recipe_memory(empty, recipe, num_ranks=num_ranks, passes=none).parts
        assert parts["weights"] == weight * ALL // num_ranks
        assert parts["optimizer"] == state * ALL // num_ranks
    # Rows are not torn: 100 over 64 ranks are 2 each at most, and every vector has an element.
    assert recipe_memory(empty, recipe, num_ranks=128, passes=none).parts["weights"] > weight * ALL // 128


def test_the_peak_is_where_most_is(empty: Any) -> None:
    rest = 2 * TABLE + 16
    long = recipe_memory(empty, "fp32", num_ranks=2, passes=Passes(activations=10**9, num_logits=10**6)).parts
    assert (long["activations"], long["gathered"], long["logits"]) == (10**9, 4 * rest, 4 * 10**6)
    deep = recipe_memory(empty, "fp32", num_ranks=2, passes=Passes(activations=10**9, num_logits=0)).parts
    assert (deep["activations"], deep["gathered"], deep["gradients"]) == (10**9, 4 * (rest + 2 * BLOCK), 8 * BLOCK)
    few = recipe_memory(empty, "fp32", num_ranks=2, passes=Passes(activations=0, num_logits=0)).parts
    assert (few["activations"], few["gradients"]) == (0, 4 * ALL // 2 + 8 * rest)


def test_activations_are_counted_without_memory(empty: Any) -> None:
    kept = {r: passes_of(empty, r, (1, 8)) for r in ("fp32", "bf16", "unit-fp8")}
    assert {p.num_logits for p in kept.values()} == {800}
    assert 0 < kept["unit-fp8"].activations < kept["bf16"].activations < kept["fp32"].activations
    assert passes_of(empty, "fp32", (2, 8)).activations == pytest.approx(2 * kept["fp32"].activations, rel=0.02)
    assert all(p.is_meta for p in empty.parameters())
    assert {p.dtype for p in empty.parameters()} == {torch.float32}


def test_the_smallest_number_of_ranks_has_room_and_half_of_it_has_not(empty: Any) -> None:
    passes = Passes(activations=1000, num_logits=10)
    room = recipe_memory(empty, "fp32", num_ranks=4, passes=passes).total_bytes
    assert smallest_world(empty, "fp32", passes=passes, memory_bytes=room) == 4
    assert smallest_world(empty, "fp32", passes=passes, memory_bytes=1000) is None
