"""Fine-tunings on the embedded plays, which are tokenised once for all tests of a module and its tokenizer."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lpconv.models.tokenizer import token_ids
from tests.helpers.checkpoints import shallow_demo


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Let `demo` name a copy of the demo model with two of its four layers, which trains faster."""
    folder = shallow_demo(tmp_path_factory.mktemp("shallow") / "demo", num_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lpconv.storage.resolve.demo_checkpoint", lambda: folder)
        yield folder


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longer than the small runs of these tests, and sums are taken in one order."""
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _imports_left_alone() -> None:
    """Each run of a trainer collects garbage, and need not look at all that earlier runs have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _texts_tokenised_once() -> Iterator[None]:
    """The plays take 0.3 s of each run, longer than some runs take for all of their steps."""
    found: dict[tuple[str, ...], Any] = {}

    @functools.wraps(token_ids)
    def remembered(tokenizer: Any, **arguments: Any) -> Any:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return token_ids(tokenizer, **arguments)
        key = (repr(tokenizer), backend.to_str(), repr(arguments))
        if key not in found:
            found[key] = token_ids(tokenizer, **arguments)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lpconv.train.examples.token_ids", remembered)
        yield
