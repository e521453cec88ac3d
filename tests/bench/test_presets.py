"""The presets are the models they are named after, and what is estimated from their shapes is near what is measured."""

import dataclasses

import pytest

from lpconv.bench.models import estimate_bytes, find_model, gemms_of
from lpconv.bench.run import choose_model
from lpconv.errors import UsageError
from lpconv.layers import blocks_of
from lpconv.models.presets import PRESETS

CASE, _ = choose_model("demo", None, {"device": "cpu", "name": "CPU"})

# Millions of parameters as published: head included, tied weights once.
PARAMETERS = {
    "bert-base": 109.5, "bert-large": 335.2, "roberta-base": 124.7, "roberta-large": 355.4, "gpt2": 124.4,
    "gpt2-medium": 354.8, "gpt2-large": 774.0, "gpt2-xl": 1557.6, "opt-125m": 125.2, "opt-1.3b": 1315.8,
    "opt-6.7b": 6658.5, "pythia-160m": 162.3, "pythia-410m": 405.3, "pythia-1.4b": 1414.6, "pythia-6.9b": 6857.3,
    "smollm2-135m": 134.5, "llama-1b": 1235.8, "llama-3b": 3212.7, "llama-8b": 8030.3, "llama-70b": 70553.7,
    "mistral-7b": 7241.7, "qwen-0.5b": 494.0, "qwen-1.5b": 1543.7, "qwen-7b": 7615.6,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_model(name: str) -> None:
    model = find_model(dataclasses.replace(CASE, model=name)).build_empty()

    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(PARAMETERS[name], rel=1e-3)


def test_fewer_layers_and_the_linears_of_those() -> None:
    model = find_model(dataclasses.replace(CASE, model="llama-8b", layers=2)).build_empty()

    gemms = {(g.n, g.k): len(g.names) for g in gemms_of(model) if not g.is_head}
    assert len(blocks_of(model)) == 2
    assert gemms == {(4096, 4096): 4, (1024, 4096): 4, (14336, 4096): 4, (4096, 14336): 2}


@pytest.mark.parametrize(
    "changes", [{"layers": 0}, {"layers": 13}, {"seq": 513}, {"model": "roberta-base", "seq": 513}]
)
def test_what_the_model_does_not_have_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        find_model(dataclasses.replace(CASE, **({"model": "bert-base"} | changes)))  # type: ignore[arg-type]


def test_the_estimate_grows_with_what_costs_memory() -> None:
    case = dataclasses.replace(CASE, model="bert-base", layers=2, seq=512)
    opened = find_model(case)
    model = opened.build_empty()

    def estimate(**changes: object) -> int:
        changed = dataclasses.replace(case, **changes)  # type: ignore[arg-type]
        return estimate_bytes(model, changed, opened.config.vocab_size)

    train = estimate(mode="train", optimizer="adamw", batch=32)
    assert estimate(batch=32) < train < estimate(mode="train", optimizer="adamw", batch=64)
    assert train < estimate(mode="train", optimizer="adamw", batch=32, format="fp32")
