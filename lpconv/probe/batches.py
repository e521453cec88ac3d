"""Batches for a probe, of windows of token ids.

Letters in shapes: B batch, L sequence length.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.models.objective import next_tokens
from lpconv.models.tasks import CLM, MLM, Task
from lpconv.models.tokenizer import Tokens

MASK_RATE = 0.15  # share of the tokens that the mask token replaces, as in BERT (arXiv 1810.04805 §3.1)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Endless batches of arguments for a model; windows repeat. `shifted`: the labels of clm are the next tokens."""

    tokens: Tokens
    task: Task
    batch_size: int
    vocab_size: int
    seed: int
    shifted: bool = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        windows = itertools.cycle(self.tokens.windows)
        while True:
            ids_BL = torch.stack(list(itertools.islice(windows, self.batch_size)))
            yield self._batch(ids_BL, generator)

    def _batch(self, ids_BL: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        if self.task is CLM:
            return {"input_ids": ids_BL, "labels": next_tokens(ids_BL) if self.shifted else ids_BL}
        if self.task is MLM:
            return self._masked(ids_BL, generator)
        return {"input_ids": ids_BL}

    def _masked(self, ids_BL: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        chosen_BL = torch.rand(ids_BL.shape, generator=generator) < MASK_RATE
        chosen_BL[:, self.tokens.num_prefix] = True  # without any label a batch has no loss
        chosen_BL[:, : self.tokens.num_prefix] = False
        chosen_BL[:, ids_BL.shape[1] - self.tokens.num_suffix :] = False
        if self.tokens.mask_id is None:
            covered_BL = torch.randint(self.vocab_size, ids_BL.shape, generator=generator)
        else:
            covered_BL = torch.full_like(ids_BL, self.tokens.mask_id)
        return {"input_ids": torch.where(chosen_BL, covered_BL, ids_BL), "labels": torch.where(chosen_BL, ids_BL, -100)}
