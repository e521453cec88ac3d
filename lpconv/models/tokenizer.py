"""The tokenizer beside a checkpoint."""

from pathlib import Path
from typing import Any

import transformers

from lpconv.errors import InputError
from lpconv.models.quiet import quiet_transformers

__all__ = ["read_tokenizer", "special_tokens"]

_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


def read_tokenizer(directory: Path) -> Any:
    """The tokenizer beside a checkpoint, or None where there is none; InputError where transformers cannot open it."""
    if not any((directory / name).exists() for name in _FILES):
        return None
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as e:  # damaged files raise anything at all, in Python and in Rust
        first = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise InputError(
            f"the tokenizer in `{directory}` does not open: {first}",
            hint="repair it, or take its files away to probe with random ids",
        ) from e


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text; none where one text does not show them."""
    with quiet_transformers():
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a")["input_ids"]
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at], full[at + len(plain) :]
    return [], []
