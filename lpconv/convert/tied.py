"""Decide which tensors of a source are one tied weight, by the config's word and the file's bytes."""

from collections.abc import Mapping
from typing import Any

import torch

from lpconv.checkpoint.source import Source
from lpconv.checkpoint.ties import tie_candidates
from lpconv.errors import InputError

__all__ = ["find_ties"]

_PIECE = 2**22


def find_ties(source: Source, config: Mapping[str, Any]) -> dict[str, str]:
    """Names that need no storage of their own, each with the name that keeps the weight.

    Tensors that share storage in a `.bin` file are tied; embedding and head are where their bytes are equal and the
    config does not say otherwise. Raises InputError where the config declares a tie and the bytes differ.
    """
    ties = {n: e.alias_of for n, e in source.entries.items() if e.alias_of is not None}
    shapes = {n: (e.info.shape, e.info.dtype) for n, e in source.entries.items() if n not in ties}
    for candidate in tie_candidates(shapes, config):
        if _equal(source, candidate.name, candidate.keep):
            ties[candidate.name] = candidate.keep
        elif candidate.declared:
            raise InputError(
                f"the config ties `{candidate.name}` to `{candidate.keep}`, but their values differ",
                hint="set tie_word_embeddings to false in config.json if both are meant to be used",
            )
    return ties


def _equal(source: Source, a: str, b: str) -> bool:
    size = source.entries[a].info.num_bytes
    left, right = torch.empty(_PIECE, dtype=torch.uint8), torch.empty(_PIECE, dtype=torch.uint8)
    for start in range(0, size, _PIECE):
        count = min(_PIECE, size - start)
        source.read_bytes(a, start, left[:count])
        source.read_bytes(b, start, right[:count])
        if not torch.equal(left[:count], right[:count]):
            return False
    return True
