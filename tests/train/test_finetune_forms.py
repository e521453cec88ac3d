"""Fine-tuning what `lpconv convert` wrote: every form trains and is published, and a pair begins where it stands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lpconv.hf
from lpconv.data import demo_checkpoint
from lpconv.errors import UsageError
from lpconv.models.opening import open_to_train
from lpconv.models.tasks import find_task
from lpconv.optim import fp32_state_dict
from lpconv.progress import Silent
from lpconv.storage.checkpoint import RESIDUAL_INDEX, Checkpoint
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import prepare
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import converted_demo

SOURCES: dict[str, dict[str, Any]] = {
    "unit": {"method": "unit", "format": "e4m3fn"},
    "collage": {"method": "collage"},
    "collage exact16": {"method": "collage", "residual": "exact16"},
    "collage fp16": {"method": "collage", "format": "fp16"},
    "multipoint": {"method": "multipoint", "format": "int8"},
}
RECIPES = ("fp32", "collage-bf16", "unit-fp8")

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture(scope="module")
def sources(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return converted_demo(tmp_path_factory.mktemp("forms"), SOURCES)


def _options(recipe: str, **more: Any) -> FinetuneOptions:
    small: dict[str, Any] = {
        "steps": 2, "batch_size": 2, "seq_len": 16, "eval_batches": 1, "twin": "none",
    }  # fmt: skip
    return FinetuneOptions(arithmetic=arithmetic(recipe=recipe), **(small | more))


def _state(folder: Path) -> dict[str, Tensor]:
    return dict(lpconv.hf.load(folder, dtype=torch.float32).state_dict())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("source", ["unit", "collage exact16", "multipoint"])  # tests/chains has other forms
def test_every_form_trains_and_what_is_published_opens(
    sources: dict[str, Path], source: str, recipe: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    finetune(str(sources[source]), out, _options(recipe))
    assert (out / RESIDUAL_INDEX).exists() == (recipe == "collage-bf16")
    tuned, before = _state(out), _state(sources[source])
    assert tuned.keys() == before.keys()
    assert any(not torch.equal(x, before[n]) for n, x in tuned.items())
    assert (out / "tokenizer_config.json").exists() == (demo_checkpoint() / "tokenizer_config.json").exists()
    if (out / "lpconv.json").exists():
        found = verify_output(out, VerifyOptions(level="hash"), progress=Silent())
        assert found.passed


@pytest.mark.parametrize("lr", [5e-5, 0.1])
def test_a_trained_output_is_compared_by_values(lr: float, tmp_path: Path) -> None:
    finetune("demo", tmp_path / "out", _options("collage-bf16", save="converted", lr=lr))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"]  # training does without
    found = verify_output(tmp_path / "out", VerifyOptions(against="demo"), progress=Silent())
    assert (found.level, found.passed) == ("values", True)
    with pytest.raises(UsageError, match="trained"):
        verify_output(tmp_path / "out", VerifyOptions(against="demo", level="logits"), progress=Silent())


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({"recipe": "unit-fp8"}, "float32"),  # whose kept tensors are fp32 and whose codes stand for fp32 values
        ({"recipe": "unit-fp8", "save": "plain"}, "float32"),
        ({"precision": "bf16", "optimizer": "fp32-master"}, "float32"),
        ({"recipe": "bf16"}, "bfloat16"),
        ({"recipe": "collage-bf16"}, "bfloat16"),
    ],
)
def test_the_config_names_the_dtype_of_what_is_published(more: dict[str, str], dtype: str, tmp_path: Path) -> None:
    parts = {k: v for k, v in more.items() if k != "save"}
    options = replace(_options("fp32", save=more.get("save", "converted"), steps=1), arithmetic=arithmetic(**parts))
    finetune("demo", tmp_path / "out", options)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("source", ["collage", "collage exact16", "collage fp16"])
def test_a_pair_begins_where_it_stands_and_ends_as_a_pair(
    sources: dict[str, Path], source: str, tmp_path: Path
) -> None:
    """The optimizer holds bf16 pairs: exactly what a bf16 residual gives, the nearest pair to what finer ones give."""
    options = _options("collage-bf16")
    whole = _state(sources[source])
    task = find_task(Checkpoint.open(sources[source]).config, "auto", has_labels=False)
    opened = open_to_train(task, sources[source], seed=0)
    model = opened.model
    assert not opened.missing
    assert all(torch.equal(x, whole[n]) for n, x in model.state_dict().items())
    prepared = prepare(model, options.arithmetic, options, seed=0)
    begun = fp32_state_dict(prepared.make_optimizer(), model)  # type: ignore[arg-type]
    for name, x in begun.items():
        if source == "collage":
            assert torch.equal(x, whole[name]), name
        assert ((x - whole[name]).abs() <= 2**-17 * whole[name].abs() + 2**-134).all(), name

    out = tmp_path / "out"
    finetune(str(sources[source]), out, _options("collage-bf16", lr=1e-30))
    for name, x in _state(out).items():  # nothing was learnt, and nothing was lost
        assert ((x - begun[name]).abs() <= 1e-28).all(), name
    root = load_file(out / "model.safetensors")
    assert {x.dtype for x in root.values()} == {torch.bfloat16}
