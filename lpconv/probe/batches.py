"""Batches for a probe: consecutive windows of a text in the model's own tokens, or random ids without a tokenizer.

Letters in shapes: B batch, L sequence length.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.errors import InputError, UsageError
from lpconv.models.inputs import random_ids
from lpconv.models.tasks import CLM, MLM, Task
from lpconv.models.tokenizer import check_largest_id, special_tokens, token_ids

__all__ = ["MASK_RATE", "Batches", "Tokens", "random_tokens", "tokenize"]

MASK_RATE = 0.15  # of the tokens, as in BERT (arXiv 1810.04805 §3.1); each becomes the mask token
# More text than any probe needs, and little enough to tokenise at once.
_MAX_CHARACTERS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Windows of token ids of shape (windows, L). `mask_id` is the tokenizer's mask token, None where it has none.

    The first `num_prefix` and last `num_suffix` ids of a window are special tokens, which are never masked.
    """

    windows: Tensor
    num_prefix: int = 0
    num_suffix: int = 0
    mask_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Keyword arguments of a model's forward pass, batch after batch, beginning again where the windows end."""

    tokens: Tokens
    task: Task
    batch_size: int
    vocab_size: int
    seed: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        windows = itertools.cycle(self.tokens.windows)
        while True:
            ids_BL = torch.stack(list(itertools.islice(windows, self.batch_size)))
            yield self._batch(ids_BL, generator)

    def _batch(self, ids_BL: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        if self.task is CLM:
            return {"input_ids": ids_BL, "labels": ids_BL}
        if self.task is MLM:
            return self._masked(ids_BL, generator)
        return {"input_ids": ids_BL}

    def _masked(self, ids_BL: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        chosen_BL = torch.rand(ids_BL.shape, generator=generator) < MASK_RATE
        chosen_BL[:, self.tokens.num_prefix] = True  # a batch without a label has no loss
        chosen_BL[:, : self.tokens.num_prefix] = False
        chosen_BL[:, ids_BL.shape[1] - self.tokens.num_suffix :] = False
        if self.tokens.mask_id is None:
            covered_BL = torch.randint(self.vocab_size, ids_BL.shape, generator=generator)
        else:
            covered_BL = torch.full_like(ids_BL, self.tokens.mask_id)
        return {
            "input_ids": torch.where(chosen_BL, covered_BL, ids_BL),
            "labels": torch.where(chosen_BL, ids_BL, -100),
        }


def tokenize(path: Path, tokenizer: Any, *, seq_len: int, vocab_size: int) -> Tokens:
    """Consecutive windows of a text file, each with the special tokens that the tokenizer puts around a text.

    Raises InputError for a file that is no text, too short for one window, or has ids that the model does not embed.
    """
    text = _read_text(path)
    ids = token_ids(tokenizer, text=text, add_special_tokens=False)
    prefix, suffix = special_tokens(tokenizer)
    room = seq_len - len(prefix) - len(suffix)
    if room < 1:
        raise UsageError(f"--seq-len {seq_len} leaves no room beside the special tokens", hint="pass a larger one")
    if len(ids) < room:
        raise InputError(
            f"`{path}` has {len(ids)} tokens, fewer than one sequence of {seq_len}",
            hint="pass a longer text or a smaller --seq-len",
        )
    check_largest_id(max(*ids, *prefix, *suffix, 0), vocab_size)
    starts = range(0, len(ids) - room + 1, room)
    windows = torch.tensor([[*prefix, *ids[i : i + room], *suffix] for i in starts])
    mask_id = getattr(tokenizer, "mask_token_id", None)
    return Tokens(windows=windows, num_prefix=len(prefix), num_suffix=len(suffix), mask_id=mask_id)


def random_tokens(*, windows: int, seq_len: int, vocab_size: int, seed: int) -> Tokens:
    """Uniformly random ids."""
    return Tokens(windows=random_ids((windows, seq_len), vocab_size, seed=seed))


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as f:
            return f.read(_MAX_CHARACTERS)
    except OSError as e:
        raise InputError(f"cannot read `{path}`: {e.strerror or e}", hint="pass a text file to --data") from e
    except UnicodeDecodeError as e:
        raise InputError(f"`{path}` is no UTF-8 text", hint="pass a text file to --data") from e
