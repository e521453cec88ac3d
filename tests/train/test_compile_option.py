"""`lpconv finetune --compile`, on a model of one layer and through a back end that compiles nothing slowly."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lpconv.errors import UnsupportedError
from lpconv.results import RunRecord
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune
from tests.helpers.models import tiny, with_demo_tokenizer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One layer, read with the tokenizer of the embedded model; compiling stops before code is generated."""
    monkeypatch.setattr(
        torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    )
    settings = {"num_hidden_layers": 1, "vocab_size": 272, "eos_token_id": 0, "tie_word_embeddings": False}
    return str(with_demo_tokenizer(tiny("llama", tmp_path / "model", **settings)))


def run(model: str, output: Path, recipe: str, **more: Any) -> RunRecord:
    asked = FinetuneOptions(
        arithmetic=arithmetic(recipe=recipe), steps=4, batch_size=2, seq_len=16, eval_batches=1, eval_every=0,
        save_every=0, twin="none", save="plain", **more,
    )  # fmt: skip
    return finetune(model, output, asked).runs[0]


def test_a_compiled_run_has_the_losses_of_an_eager_one(model: str, tmp_path: Path) -> None:
    compiled = run(model, tmp_path / "compiled", "collage-bf16", compile=True)
    eager = run(model, tmp_path / "eager", "collage-bf16")
    assert compiled.losses.values == pytest.approx(eager.losses.values, rel=1e-3)


@pytest.mark.parametrize(("recipe", "why"), [("amp-fp16", "dispatch"), ("adaptive-fp16", "values")])
def test_what_cannot_be_compiled_is_refused(recipe: str, why: str, model: str, tmp_path: Path) -> None:
    if recipe == "amp-fp16" and torch.cuda.is_available():
        pytest.skip("a GPU compiles fp16")
    with pytest.raises(UnsupportedError, match=why):
        run(model, tmp_path / "run", recipe, compile=True)


def test_what_the_compiler_fails_on_is_no_bug_of_ours(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise RuntimeError("C++ compile error")

    compile_module = functools.partialmethod(torch.nn.Module.compile, backend=broken)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    with pytest.raises(UnsupportedError, match="C\\+\\+") as caught:
        run(model, tmp_path / "run", "bf16", compile=True)
    assert caught.value.hint == "leave --compile out"
