"""Fine-tunings on the embedded plays, which are tokenised once for all tests of a module and its tokenizer."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from lpconv.models.tokenizer import token_ids


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
