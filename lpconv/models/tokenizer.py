"""The tokenizer of a checkpoint, and a text as windows of its tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lpconv.data import read_text
from lpconv.errors import InputError, UsageError
from lpconv.models.quiet import quiet_transformers

_FILES = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
# More text than any probe needs, and little enough to tokenise at once.
_MAX_CHARACTERS = 4_000_000
_MANY_UNKNOWN = 0.05


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


def token_ids(tokenizer: Any, *, vocab_size: int | None = None, **arguments: Any) -> Any:
    """The ids that a tokenizer makes of a text or of several. Raises InputError where it fails, or makes ids that a
    model with an embedding of `vocab_size` does not have."""
    try:
        with quiet_transformers():
            found = tokenizer(**arguments)["input_ids"]
    except Exception as e:  # damaged settings show when they are used
        first = next(iter(str(e).splitlines()), "")
        raise InputError(
            f"the tokenizer does not read the text: {type(e).__name__}: {first:.120}",
            hint="compare the files of the tokenizer with those of the original model",
        ) from e
    if vocab_size is not None:
        largest = max((max(ids, default=0) for ids in found), default=0)
        check_largest_id(largest, vocab_size)
    return found


def check_largest_id(largest: int, vocab_size: int) -> None:
    """Raise InputError where a model that embeds so many ids has none for the largest."""
    if largest >= vocab_size:
        raise InputError(
            f"the tokenizer makes ids up to {largest}, the model embeds {vocab_size}",
            hint="this is the tokenizer of another model",
        )


def special_id(tokenizer: Any, name: str) -> int | None:
    """The id of the token that a tokenizer has for ``mask``, ``unk``, ``pad`` or ``eos``; None where it has none.

    Raises InputError where its settings name a token that it cannot look up.
    """
    try:
        found: int | None = getattr(tokenizer, f"{name}_token_id", None)
    except Exception as e:  # a token that is unknown is looked for as the unknown one, and so on
        raise InputError(
            f"the tokenizer's {name} token has no id: {type(e).__name__}",
            hint="compare the files of the tokenizer with those of the original model",
        ) from e
    return found


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text; none where one text does not show them."""
    plain, full = token_ids(tokenizer, text="a", add_special_tokens=False), token_ids(tokenizer, text="a")
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at], full[at + len(plain) :]
    return [], []


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Windows of token ids of shape (windows, L). `mask_id` is the tokenizer's mask token, None where it has none.

    The first `num_prefix` and last `num_suffix` ids of a window are special tokens, which are never masked. `unknown`
    is the share of the text's tokens that the tokenizer does not know.
    """

    windows: Tensor
    num_prefix: int = 0
    num_suffix: int = 0
    mask_id: int | None = None
    unknown: float = 0.0

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why figures on this text may say little, in words; empty where there is no reason."""
        if self.unknown < _MANY_UNKNOWN:
            return ()
        share = f"{self.unknown:.0%}".replace("%", " %")
        return (f"{share} of the text's tokens are unknown to the tokenizer: give --data what the model reads",)


def tokenize(path: Path, tokenizer: Any, *, seq_len: int, vocab_size: int) -> Tokens:
    """Consecutive windows of a text file, each with the special tokens that the tokenizer puts around a text.

    Raises InputError for a file that is no text, too short for one window, or has ids that the model does not embed.
    """
    text = read_text(path, _MAX_CHARACTERS)
    ids = token_ids(tokenizer, text=text, add_special_tokens=False)
    prefix, suffix = special_tokens(tokenizer)
    room = seq_len - len(prefix) - len(suffix)
    if room < 1:
        raise UsageError(f"--seq-len {seq_len} leaves no room beside the special tokens", hint="pass a larger one")
    if len(ids) < room:
        raise InputError(
            f"`{path}` has {len(ids)} tokens, fewer than one sequence of {seq_len}",
            hint="pass a longer text, or shorter sequences by --seq-len where that is an option",
        )
    check_largest_id(max(*ids, *prefix, *suffix, 0), vocab_size)
    starts = range(0, len(ids) - room + 1, room)
    windows = torch.tensor([[*prefix, *ids[i : i + room], *suffix] for i in starts])
    mask_id, unknown_id = special_id(tokenizer, "mask"), special_id(tokenizer, "unk")
    return Tokens(
        windows=windows,
        num_prefix=len(prefix),
        num_suffix=len(suffix),
        mask_id=mask_id,
        unknown=ids.count(unknown_id) / len(ids) if unknown_id is not None else 0.0,
    )
