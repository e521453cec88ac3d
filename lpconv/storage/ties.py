"""Tied weights: input embedding and output head that are one matrix. Plain Python, without torch.

A tie appears in three ways: the head is not in the file (nothing to do), both share one storage in a `.bin` file, or
both are stored. For the last case the names below define which pairs can be tied, and the config whether they should
be.
"""

import re
from collections.abc import Mapping
from typing import Any

from lpconv.errors import InputError
from lpconv.storage.source import Source

# Input embeddings, of which the first match is kept; then heads that may be tied to it. Other embeddings are tied
# to a shared one only: T5Gemma's encoder and decoder have two different matrices, whatever its config says.
_SHARED = r"(^|\.)shared\.weight$"
_EMBEDDINGS = (
    _SHARED,
    r"(^|\.)(embed_tokens|word_embeddings|wte|embed_in|tok_embeddings|word_embedding)\.weight$",
)
_HEADS = r"(^|\.)(lm_head|embed_out|generator_lm_head|predictions\.decoder|lm_head\.decoder|vocab_projector)\.weight$"
_PIECE = 2**22  # bytes of two tensors that are compared at a time


def find_ties(source: Source, config: Mapping[str, Any]) -> dict[str, str]:
    """Names that need no storage of their own, each with the name that keeps the weight.

    Tensors that share storage in a `.bin` file are tied; embedding and head are tied if their bytes are equal and the
    config does not deny it. Raises InputError if the config declares a tie and the bytes differ.
    """
    ties = {n: e.alias_of for n, e in source.entries.items() if e.alias_of is not None}
    shapes = {n: (e.info.shape, e.info.dtype) for n, e in source.entries.items() if n not in ties}
    for name, keep in tie_candidates(shapes, config).items():
        if _equal_bytes(source, name, keep):
            ties[name] = keep
        elif _declared(config):
            raise InputError(
                f"the config ties `{name}` to `{keep}`, but their values differ",
                hint="set tie_word_embeddings to false in config.json if both are meant to be used",
            )
    return ties


def _equal_bytes(source: Source, a: str, b: str) -> bool:
    size = source.entries[a].info.num_bytes
    left, right = bytearray(_PIECE), bytearray(_PIECE)
    for start in range(0, size, _PIECE):
        count = min(_PIECE, size - start)
        for name, piece in ((a, left), (b, right)):
            source.read_bytes(name, start, memoryview(piece)[:count])
        if left[:count] != right[:count]:
            return False
    return True


def tie_candidates(shapes: Mapping[str, tuple[tuple[int, ...], str]], config: Mapping[str, Any]) -> dict[str, str]:
    """Names that may be the same matrix as another tensor, and the name of that one, by name, shape and dtype.

    `shapes` maps names to (shape, dtype).
    """
    keep = next((n for pattern in _EMBEDDINGS for n in sorted(shapes) if re.search(pattern, n)), None)
    declared = _declared(config)
    if keep is None or declared is False:
        return {}
    may_be_tied = (*_EMBEDDINGS, _HEADS) if re.search(_SHARED, keep) else (_HEADS,)
    others = (n for n in shapes if n != keep and shapes[n] == shapes[keep])
    return {n: keep for n in others if any(re.search(pattern, n) for pattern in may_be_tied)}


def _declared(config: Mapping[str, Any]) -> bool | None:
    """Whether the config ties embedding and head; None if it does not say."""
    text = config.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    declared: bool | None = config.get("tie_word_embeddings", nested)
    return declared
