"""The tokenizer of a checkpoint, and windows of a text's tokens."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lpconv.data.texts import check_largest_id, check_tokenizer, check_turns, has_tokenizer, text_of
from lpconv.errors import InputError, UsageError, first_line
from lpconv.models.inputs import sequence_length, vocabulary_size
from lpconv.models.opening import read_text_config
from lpconv.progress import quiet_transformers
from lpconv.storage.checkpoint import Checkpoint

# More text than any probe needs, but short enough to tokenise at once.
_MAX_CHARACTERS = 4_000_000
_MANY_UNKNOWN = 0.05
_PLACEHOLDER = "\ue000"  # a character for private use, which no template has
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names of roles


def read_tokenizer(directory: Path) -> Any:
    """The tokenizer of a checkpoint, or None if it has none. Raises InputError if transformers cannot open it."""
    if not has_tokenizer(directory):
        return None
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as e:  # damaged files raise any exception, in Python or in Rust
        raise InputError(
            f"the tokenizer in `{directory}` cannot be opened: {first_line(e)}",
            hint="repair its files; without them, commands that can use random token ids do",
        ) from e


def token_ids(tokenizer: Any, *, vocab_size: int | None = None, **arguments: Any) -> Any:
    """Tokenize one or more texts into ids.

    Raises InputError if the tokenizer fails or makes ids beyond an embedding of `vocab_size`.
    """
    try:
        with quiet_transformers():
            ids_of_texts = tokenizer(**arguments)["input_ids"]
    except Exception as e:  # damaged settings fail on use
        raise InputError(
            f"the tokenizer fails on the text: {type(e).__name__}: {first_line(e):.120}",
            hint="compare the tokenizer files with those of the original model",
        ) from e
    if vocab_size is not None:
        largest = max((max(ids, default=0) for ids in ids_of_texts), default=0)
        check_largest_id(largest, vocab_size)
    return ids_of_texts


def chat_text(tokenizer: Any, turns: Sequence[Mapping[str, Any]], name: str, **options: Any) -> str:
    """The text of a conversation through the tokenizer's chat template; raises InputError if that fails.

    `name` is the file's, for errors, and `options` are those of `apply_chat_template`.
    """
    check_turns(turns, str(tokenizer.chat_template), name)
    try:
        return str(tokenizer.apply_chat_template([*map(chat_message, turns)], tokenize=False, **options))
    except Exception as e:  # templates raise errors of their own
        raise InputError(
            f"the chat template cannot render a conversation of `{name}`, {turns!r:.80}: {first_line(e)}",
            hint="turns have `role` and `content`, or ShareGPT's `from` and `value`, with roles of the template",
        ) from e


def chat_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn as templates read it, with its text in one piece.

    Fields that only other turns have are None in Arrow, and left out.
    """
    if "from" in turn:
        return {"role": _SHAREGPT.get(turn["from"], turn["from"]), "content": turn["value"]}
    text = turn["content"]
    text = "".join(part["text"] for part in text) if isinstance(text, list) else text
    return {k: v for k, v in turn.items() if v is not None} | {"role": turn["role"], "content": text}


def answer_tokens(tokenizer: Any, turns: Sequence[Mapping[str, Any]], name: str) -> list[tuple[list[int], list[bool]]]:
    """Token ids of a conversation, and which of them an assistant wrote.

    A template with ``{% generation %}`` marks says which. Otherwise an answer is what its turn adds to the text before
    it. A template that shortens earlier answers (as Qwen3's does) gives one entry per answer, each up to that answer.
    """
    messages = [*map(chat_message, turns)]
    whole = chat_text(tokenizer, messages, name)
    if re.search(r"{%-?\s*generation\b", str(tokenizer.chat_template)):
        marked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return [(marked["input_ids"], [x == 1 for x in marked["assistant_masks"]])]
    spans = []  # (text up to an answer and with it, start of the answer)
    for i in (i for i, x in enumerate(messages) if x["role"] == "assistant"):
        before = _prompt(tokenizer, messages[: i + 1], name)
        text = chat_text(tokenizer, messages[: i + 1], name)
        if not text.startswith(before):
            raise InputError(
                f"the chat template does not show where an answer begins in a conversation of `{name}`, {turns!r:.80}",
                hint="put {% generation %} and {% endgeneration %} around answers in chat_template.jinja",
            )
        spans.append((text, len(before)))
    if all(whole.startswith(text) for text, _ in spans):
        return [_marked(tokenizer, whole, [(start, len(text)) for text, start in spans])]
    return [_marked(tokenizer, text, [(start, len(text))]) for text, start in spans]


def _prompt(tokenizer: Any, turns: Sequence[Mapping[str, Any]], name: str) -> str:
    """The text before the answer in the last turn, which in a first turn is what stands before any content."""
    if len(turns) > 1:
        return chat_text(tokenizer, turns[:-1], name, add_generation_prompt=True)
    return chat_text(tokenizer, [{**turns[0], "content": _PLACEHOLDER}], name).partition(_PLACEHOLDER)[0]


def _marked(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and which of them have characters in one of the spans, as transformers marks them."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [any(at < b and a < end for a, b in spans) for at, end in encoded["offset_mapping"]]


def special_id(tokenizer: Any, name: str) -> int | None:
    """The id of the tokenizer's ``mask``, ``unk``, ``pad`` or ``eos`` token, or None.

    Raises InputError if its settings name a token that it cannot look up.
    """
    try:
        token_id: int | None = getattr(tokenizer, f"{name}_token_id", None)
    except Exception as e:  # unknown tokens are looked up as `unk`, which may be unknown too
        raise InputError(
            f"the tokenizer's {name} token has no id: {type(e).__name__}",
            hint="compare the tokenizer files with those of the original model",
        ) from e
    return token_id


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text; empty if one example text does not show them."""
    plain, full = token_ids(tokenizer, text="a", add_special_tokens=False), token_ids(tokenizer, text="a")
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at], full[at + len(plain) :]
    return [], []


def room_for_text(seq_len: int, prefix: list[int], suffix: list[int], *, least: int = 1) -> int:
    """Number of tokens of text in a window with these special tokens. Raises UsageError for fewer than `least`."""
    room = seq_len - len(prefix) - len(suffix)
    if room < least:
        raise UsageError(
            f"--seq-len {seq_len} leaves no room for text next to the special tokens", hint="pass a larger --seq-len"
        )
    return room


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Windows of token ids of shape (windows, L). `mask_id` is the tokenizer's mask token, or None.

    The first `num_prefix` and last `num_suffix` ids of a window are special tokens, which are never masked. `unknown`
    is the fraction of the text's tokens that the tokenizer does not know.
    """

    windows: Tensor
    num_prefix: int = 0
    num_suffix: int = 0
    mask_id: int | None = None
    unknown: float = 0.0

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons why results on this text may be unreliable; usually none."""
        if self.unknown < _MANY_UNKNOWN:
            return ()
        share = f"{self.unknown:.0%}".replace("%", " %")
        return (f"{share} of the tokens are unknown to the tokenizer; pass --data with text like the model's",)


def tokenize(path: Path, tokenizer: Any, *, seq_len: int, vocab_size: int) -> Tokens:
    """Consecutive windows of a text file, or of the texts in a file of rows, each with the usual special tokens.

    Raises InputError for a file that is not text, is too short for one window, or has ids that the model does not
    embed.
    """
    text = text_of(path, _MAX_CHARACTERS, lambda turns: chat_text(tokenizer, turns, path.name))
    ids = token_ids(tokenizer, text=text, add_special_tokens=False)
    prefix, suffix = special_tokens(tokenizer)
    room = room_for_text(seq_len, prefix, suffix)
    if len(ids) < room:
        raise InputError(
            f"`{path}` has {len(ids)} tokens, fewer than one sequence of {seq_len}",
            hint="pass a longer text",
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


def windows_of(
    where: Sequence[Checkpoint], config: Any, data: Path, seq_len: int | None, max_tokens: int
) -> tuple[Tokens, int]:
    """A text cut into windows, and their length. Raises InputError if no checkpoint has a tokenizer."""
    length, tokenizer = sequence_length(config, seq_len), tokenizer_of(where)
    with quiet_transformers():
        tokens = tokenize(data, tokenizer, seq_len=length, vocab_size=vocabulary_size(config))
    windows = tokens.windows[: max(max_tokens // length, 1)]
    return replace(tokens, windows=windows), length


def tokenizer_of(where: Sequence[Checkpoint]) -> Any:
    """The tokenizer of the first checkpoint that has one. Raises InputError if none does."""
    check_tokenizer(*(c.directory for c in where))
    return next(t for c in where if (t := read_tokenizer(c.directory)) is not None)


def calibration_windows(
    model: Checkpoint, text: Path, num_tokens: int, seed: int | None, *, hint: str
) -> tuple[Any, Tokens, int]:
    """(config of the model, windows of the text, their length): the first windows, or with `seed` a random choice.

    Raises UnsupportedError with `hint` for a model that does not read text.
    """
    config = read_text_config(model, hint=hint, allow_pairs=True)
    if seed is None:
        return config, *windows_of((model,), config, text, None, num_tokens)
    tokens, length = windows_of((model,), config, text, None, sys.maxsize)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(tokens.windows), generator=generator)
    chosen = order[: max(num_tokens // length, 1)].sort().values
    return config, replace(tokens, windows=tokens.windows[chosen]), length
