"""Tied weights: input embedding and output head that are one matrix. Plain Python, without torch.

A tie appears in three ways: the head is not in the file (nothing to do), both share one storage in a `.bin` file, or
both are stored. Equal bytes alone are no tie: a model that does not tie its weights needs both, and layers of a `.bin`
file may share storage by accident. So only weights that the model's class ties are left out, and transformers is asked
about these, unless config.json declares the tie of a family that lpconv knows.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lpconv.errors import UnsupportedError
from lpconv.models.whole import known_shapes
from lpconv.storage.checkpoint import Checkpoint
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


def find_ties(source: Source, checkpoint: Checkpoint) -> dict[str, str]:
    """Names that need no storage of their own, each with the name that keeps the weight.

    These are stored tensors with equal bytes that the model ties. If the bytes differ, transformers uses both.
    """
    aliases = {n: e.alias_of for n, e in source.entries.items() if e.alias_of is not None}
    shapes = {n: (e.info.shape, e.info.dtype) for n, e in source.entries.items()}
    named = tie_candidates({n: facts for n, facts in shapes.items() if n not in aliases}, checkpoint.config)
    equal = aliases | {n: keep for n, keep in named.items() if _equal_bytes(source, n, keep)}
    return tied_by_model(checkpoint, {n: shape for n, (shape, _) in shapes.items()}, equal)


def tie_warnings(
    shapes: Mapping[str, tuple[tuple[int, ...], str]], config: Mapping[str, Any], ties: Mapping[str, str]
) -> Iterator[str]:
    """Warnings about weights that the config ties, but that are not among the `ties` that were found.

    transformers writes such configs, for example for T5 1.1, whose config always declares a tie.
    """
    for name, keep in tie_candidates(shapes, config).items() if _declared(config) else ():
        if name not in ties:
            yield (
                f"the config ties `{name}` to `{keep}`, but both are stored: transformers uses both if they differ, "
                "other programs may use only one"
            )


def tied_by_model(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], candidates: Mapping[str, str]
) -> dict[str, str]:
    """Those of the `candidates` that the model of a checkpoint ties; `shapes` are those of its tensors.

    Models that transformers does not build tie what their config declares.
    """
    declared = _declared(checkpoint.config)
    if not candidates or declared is False:
        return {}
    by_name = {n for n in candidates if any(re.search(pattern, n) for pattern in (*_EMBEDDINGS, _HEADS))}
    if declared and by_name == candidates.keys() and known_shapes(checkpoint.config) is not None:
        return dict(candidates)
    from lpconv.models.empty import tied_names  # transformers takes seconds to import

    try:
        groups = tied_names(checkpoint, shapes)
    except UnsupportedError:
        return {n: keep for n, keep in candidates.items() if declared and n in by_name}
    return {n: keep for n, keep in candidates.items() if any({n, keep} <= group for group in groups)}


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
