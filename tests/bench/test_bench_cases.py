"""Formats, methods, modes and sizes, multiplied out."""

import pytest
from torch import nn

from lpconv.bench.options import BENCH_FORMATS, BENCH_METHODS, BENCH_OPTIMIZERS, PLAIN, SCALED, BenchOptions, Case
from lpconv.bench.recipes import _OPTIMIZERS, _PEERS, apply_recipe
from lpconv.bench.run import baseline_of, cases_of
from lpconv.kernels.linear import FP4_RECIPES, FP8_RECIPES
from lpconv.models.presets import PRESETS
from lpconv.scaled import scaling_of

CPU = {"device": "cpu", "name": "CPU"}


def cases(**asked: object) -> list[Case]:
    found, _ = cases_of(BenchOptions(model="demo", **asked), CPU)  # type: ignore[arg-type]  # the cases below are well typed
    return found


def test_methods_apply_to_the_formats_that_have_them() -> None:
    found = cases(formats=("bf16", "fp16", "fp8"), methods=("unit", "scalify", "mx"))

    assert [(c.format, c.method) for c in found] == [
        ("bf16", "plain"), ("fp16", "plain"), ("fp16", "unit"), ("fp16", "scalify"),
        ("fp8", "unit"), ("fp8", "scalify"), ("fp8", "mx"),
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["unit", "scalify"])
def test_scaled_methods_are_those_that_finetune_trains(method: str) -> None:
    (case,) = cases(methods=(method,))

    scaling = scaling_of(apply_recipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), case, {}))

    assert scaling is not None
    assert (scaling.method, scaling.compute) == (method, "fp8")


def test_an_optimizer_belongs_to_training_only() -> None:
    found = cases(modes=("infer", "train"), optimizers=("adamw", "collage-plus"))

    assert [(c.mode, c.optimizer) for c in found] == [("infer", None), ("train", "adamw"), ("train", "collage-plus")]


def test_the_baseline_shares_everything_but_format_method_and_optimizer() -> None:
    (case,) = cases(methods=("scalify",), modes=("train",), optimizers=("adamw",))

    base = baseline_of(case, "bf16+compile", compiled="blocks")

    assert (base.format, base.method, base.compiled) == ("bf16", "plain", "blocks")
    assert (base.model, base.batch, base.seq, base.mode) == (case.model, case.batch, case.seq, case.mode)
    assert baseline_of(case, "fp32", compiled="blocks").compiled == "off"


def test_every_peer_is_run_by_somebody_and_every_preset_is_there() -> None:
    assert BENCH_FORMATS["fp4"].keys() <= FP4_RECIPES.keys()
    ours = {PLAIN, *SCALED, *FP8_RECIPES, *BENCH_FORMATS["fp4"]}
    assert {m for m, peer in BENCH_METHODS.items() if peer is None} == ours
    assert {m for m, peer in BENCH_METHODS.items() if peer is not None} == set(_PEERS)
    assert set(BENCH_OPTIMIZERS) == set(_OPTIMIZERS)
    assert {"bert-base", "bert-large", "gpt2", "llama-1b", "llama-3b", "llama-8b", "mistral-7b"} <= set(PRESETS)
