"""A text in a model's own tokens: consecutive windows, each with the special tokens around it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.data import read_text
from lpconv.errors import InputError, UsageError
from lpconv.models.tokenizer import check_largest_id, special_id, special_tokens, token_ids

# More text than any probe needs, and little enough to tokenise at once.
_MAX_CHARACTERS = 4_000_000
_MANY_UNKNOWN = 0.05


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
