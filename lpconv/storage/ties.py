"""Tied weights: input embedding and output head that are one matrix. Plain Python, without torch.

A tie appears in three ways: the head is not in the file (nothing to do), both share one storage in a `.bin` file, or
both are stored. For the last case the names below define which pairs can be tied, and the config whether they should
be.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class TieCandidate:
    """`name` may be the same matrix as `keep`. `declared` is True if the config ties them, None if it does not say."""

    name: str
    keep: str
    declared: bool | None


def find_ties(source: Source, config: Mapping[str, Any]) -> dict[str, str]:
    """Names that need no storage of their own, each with the name that keeps the weight.

    Tensors that share storage in a `.bin` file are tied; embedding and head are tied if their bytes are equal and the
    config does not deny it. Raises InputError if the config declares a tie and the bytes differ.
    """
    ties = {n: e.alias_of for n, e in source.entries.items() if e.alias_of is not None}
    shapes = {n: (e.info.shape, e.info.dtype) for n, e in source.entries.items() if n not in ties}
    for candidate in tie_candidates(shapes, config):
        if _equal_bytes(source, candidate.name, candidate.keep):
            ties[candidate.name] = candidate.keep
        elif candidate.declared:
            raise InputError(
                f"the config ties `{candidate.name}` to `{candidate.keep}`, but their values differ",
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


def tie_candidates(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], config: Mapping[str, Any]
) -> tuple[TieCandidate, ...]:
    """Pairs that could be tied, by name, shape and dtype; `shapes` maps names to (shape, dtype)."""
    keep = _first_embedding(shapes)
    declared = config.get("tie_word_embeddings", _nested(config))
    if keep is None or declared is False:
        return ()
    may_be_tied = (*_EMBEDDINGS, _HEADS) if re.search(_SHARED, keep) else (_HEADS,)
    others = (n for n in shapes if n != keep and shapes[n] == shapes[keep] and _matches(n, may_be_tied))
    return tuple(TieCandidate(name=n, keep=keep, declared=declared) for n in others)


def _nested(config: Mapping[str, Any]) -> bool | None:
    text = config.get("text_config")
    return text.get("tie_word_embeddings") if isinstance(text, dict) else None


def _first_embedding(names: Iterable[str]) -> str | None:
    ordered = sorted(names)
    for pattern in _EMBEDDINGS:
        for name in ordered:
            if re.search(pattern, name):
                return name
    return None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(p, name) for p in patterns)
