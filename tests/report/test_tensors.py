"""Tensors come in layer order, grouped by module and by what was done to them."""

import math
from dataclasses import replace

import pytest

from lpconv.report.tensors import in_layer_order, modules_of, overflow_text, worst_tensors
from lpconv.results import TensorRecord
from tests.helpers.report_examples import llama_shapes


def a_tensor(name: str, sqnr_db: float | None) -> TensorRecord:
    return TensorRecord(
        name=name, shape=(2, 2), source_dtype="F32", action="convert", format="fp16", reason="matrix", sqnr_db=sqnr_db
    )


@pytest.mark.parametrize(("stored", "dtype", "count"), [("fp16", "F32", 1), ("fp16", "F64", 0), ("bf16", "F32", 1)])
def test_another_format_is_named_only_where_it_has_the_range(stored: str, dtype: str, count: int) -> None:
    t = replace(a_tensor("a", None), format=stored, source_dtype=dtype, num_saturated=1)
    assert overflow_text(t).count("bf16") == count


def test_layers_are_ordered_by_number_between_embeddings_and_head() -> None:
    names = ["lm_head.weight", "model.norm.weight", "model.layers.10.a.weight", "model.layers.9.a.weight",
             "model.embed_tokens.weight"]  # fmt: skip
    ordered = [t.name for t in in_layer_order([a_tensor(n, 1.0) for n in names])]
    assert ordered == [
        "model.embed_tokens.weight",
        "model.layers.9.a.weight",
        "model.layers.10.a.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_what_stands_beside_a_llamas_layers_is_not_lumped_together() -> None:
    modules = modules_of(list(llama_shapes(2)))
    assert modules["model.norm.weight"] == "model.norm"
    assert modules["model.embed_tokens.weight"] == "model.embed_tokens"
    assert modules["lm_head.weight"] == "lm_head"
    assert modules["model.layers.1.mlp.up_proj.weight"] == "model.layers.1"


def test_worst_first_with_nan_worst_of_all_and_exact_left_out() -> None:
    tensors = [a_tensor("a", 30.0), a_tensor("b", math.inf), a_tensor("c", 20.0), a_tensor("d", None),
               a_tensor("e", math.nan)]  # fmt: skip
    assert [t.name for t in worst_tensors(tensors, 8)] == ["e", "c", "a"]
    assert [t.name for t in worst_tensors(tensors, 1)] == ["e"]
