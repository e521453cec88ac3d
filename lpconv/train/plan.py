"""What a step needs of each rank that shares a model by FSDP2, found on a model without memory.

One of three moments is the peak. When the loss hands back its gradient, all activations are there, that gradient in
fp32 beside them, and what lies outside of blocks is gathered. When the last block hands back its own, logits are gone,
two blocks are gathered, one of them ahead, and the block's gradients are whole. At the end activations are gone, and
all gradients are there, those of what lies outside of blocks whole once more. The optimizer's own temporary tensors are
left out, as in what a run measures (`lpconv.train.memory`).
"""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lpconv.layers import blocks_of
from lpconv.results import RecipeMemory
from lpconv.scaled import saved_bytes
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import prepare
from lpconv.train.recipes import RECIPES, TRAINING_OPTIMIZERS, Arithmetic

__all__ = ["Passes", "passes_of", "recipe_memory", "smallest_world"]

_REDUCED = 4  # bytes: gradients are summed in fp32
_WORLDS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What a forward pass leaves for the backward pass on a rank, in bytes, and the number of logits it makes."""

    activations: int
    num_logits: int


def recipe_memory(empty: nn.Module, recipe: str, *, num_ranks: int, passes: Passes) -> RecipeMemory:
    """The parts of a step's peak under a recipe on rank 0, whose rows are the most, in bytes."""
    arithmetic = RECIPES[recipe].arithmetic
    weight, crossing = _weight_bytes(arithmetic), _crossing_bytes(arithmetic)
    rows = _own_elements(empty.parameters(), num_ranks)
    block, rest = _sizes(empty)
    logits = 4 * passes.num_logits
    widened = (4 + crossing) * passes.num_logits if arithmetic.is_scaled_fp8 else 0  # log-probabilities kept in 16 bits
    whole = crossing + _REDUCED  # of a gradient: as it is found, and where it is summed
    moments = (
        {"gathered": crossing * rest, "activations": passes.activations, "gradients": 0, "logits": logits + widened},
        {
            "gathered": crossing * (rest + 2 * block),
            "activations": max(passes.activations - logits, 0),
            "gradients": whole * block,
            "logits": 0,
        },
        {"gathered": crossing * rest, "activations": 0, "gradients": weight * rows + whole * rest, "logits": 0},
    )
    kept = {"weights": weight * rows, "optimizer": _state_bytes(arithmetic) * rows}
    most = max(moments, key=lambda parts: sum(parts.values()))
    return RecipeMemory(recipe=recipe, num_ranks=num_ranks, parts=kept | most)


def smallest_world(empty: nn.Module, recipe: str, *, passes: Passes, memory_bytes: int) -> int | None:
    """The smallest power of two of ranks of which each has the memory; None where no number has."""
    for num_ranks in _WORLDS:
        if recipe_memory(empty, recipe, num_ranks=num_ranks, passes=passes).total_bytes <= memory_bytes:
            return num_ranks
    return None


def passes_of(empty: Any, recipe: str, batch_shape: tuple[int, int]) -> Passes:
    """What a recipe leaves of a batch of token ids.

    Autocast does not see tensors without memory: recipes that use it are counted in fp32, and need less.
    """
    arithmetic = RECIPES[recipe].arithmetic
    model = copy.deepcopy(empty)
    if arithmetic.is_scaled or arithmetic.variant is not None:
        model = prepare(model, arithmetic, FinetuneOptions(arithmetic=arithmetic), seed=0).model
    ids = torch.zeros(batch_shape, dtype=torch.long, device="meta")
    activations = saved_bytes(model, {"input_ids": ids, "labels": ids})
    return Passes(activations=activations, num_logits=ids.numel() * empty.config.vocab_size)


def _sizes(empty: nn.Module) -> tuple[int, int]:
    """The parameters of the largest block, and of what lies outside of blocks."""
    blocks = [b for b in blocks_of(empty) if b is not empty]
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = sum(p.numel() for p in empty.parameters() if id(p) not in inside)
    return max((sum(p.numel() for p in b.parameters()) for b in blocks), default=0), rest


def _state_bytes(arithmetic: Arithmetic) -> int:
    """Of the optimizer's state: fp32 weights of 4 bytes have a gradient of 4, and 16-bit ones of 2."""
    if arithmetic.optimizer == "fp16-state":
        return 4  # two moments of 16 bits; the fp32 copy is the parameter itself
    return TRAINING_OPTIMIZERS[arithmetic.optimizer].bytes_per_parameter - 2 * _weight_bytes(arithmetic)


def _weight_bytes(arithmetic: Arithmetic) -> int:
    """Of a parameter as it is kept, and of its gradient."""
    return 4 if arithmetic.variant is None else 2


def _crossing_bytes(arithmetic: Arithmetic) -> int:
    """Of a gathered parameter, and of its gradient before it is summed."""
    return 2 if arithmetic.variant is not None or (arithmetic.is_scaled and arithmetic.precision != "fp32") else 4


def _own_elements(parameters: Iterable[Any], num_ranks: int) -> int:
    """What the first rank has: rows are shared out, rounded up."""
    return sum(math.ceil(p.shape[0] / num_ranks) * (p.numel() // max(p.shape[0], 1)) for p in parameters)
