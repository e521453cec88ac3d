"""Examples of token ids from rows of text, one kind per task, and their order in a run.

A run's data set has an entry for each position in each batch of all its steps. Order and masking are functions of seed
and position alone, so a twin, a resumed run and a run on more processes see the same data.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lpconv.data.texts import check_largest_id
from lpconv.errors import InputError
from lpconv.models.objective import IGNORED
from lpconv.models.tokenizer import room_for_text, special_id, token_ids
from lpconv.probe.checkpoint import MASK_RATE
from lpconv.train.data import HELD_OUT, Rows, no_answers, one_row

Example = Mapping[str, Any]

_CHUNK = 1000  # texts tokenised at a time


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Training and held-out examples. `labels` are the names of classes; `notes` are messages for the user."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    words: str
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def pack_examples(
    rows: Rows, tokenizer: Any, *, seq_len: int, vocab_size: int, prefix: list[int], suffix: list[int],
    answers_only: bool = False,
) -> Examples:  # fmt: skip
    """Concatenate texts, separated by an end-of-text token, and cut them into windows of `seq_len`.

    There is no padding; an incomplete last window is dropped. `prefix` and `suffix` are the special tokens of every
    window (`lpconv.models.tokenizer.special_tokens`). With `answers_only`, labels of conversations are the tokens of
    the assistant, and windows without any are left out. Raises InputError if a part does not fill one window, or has
    ids that the model does not embed.
    """
    answers = rows.answers if answers_only else None

    def windows_of(part: Any) -> list[Example]:
        return _windows(rows, part, tokenizer, prefix, suffix, seq_len, vocab_size, answers)

    if rows.held_out is None:
        windows = windows_of(rows.train)
        cut = max(1, len(windows) // HELD_OUT)
        if len(windows) < 2:
            raise _too_short(rows.words, seq_len)
        train, held_out = windows[:-cut], windows[-cut:]
    else:
        train, held_out = windows_of(rows.train), windows_of(rows.held_out)
    texts = [x for part in (rows.train, rows.held_out) for x in (part[rows.text] if part is not None else ())]
    empty = sum(not x for x in texts)
    return Examples(
        train=train,
        held_out=held_out,
        words=f"{rows.words}: {len(train):,} windows of {seq_len} tokens, {len(held_out):,} held out"
        f"{'; the loss is over the answers of the assistant' if answers else ''}",
        notes=(f"{empty} of {len(texts)} rows have no text in column `{rows.text}` and were left out",) * (empty > 0),
    )


def classification(rows: Rows, tokenizer: Any, *, seq_len: int, vocab_size: int, head: Sequence[str] = ()) -> Examples:
    """Texts, truncated to `seq_len`, with a class each.

    Classes are those of a trained `head` by name or number, or for a new one the column's names in alphabetical
    order, or its numbers from 0. Raises InputError for rows without a label and for labels out of range.
    """
    assert rows.label is not None
    if rows.held_out is None:
        raise one_row(rows.words)
    names, numbers = _classes(rows, head)
    cut = 0

    def examples(part: Any) -> list[Example]:
        nonlocal cut
        texts = rows.texts(part)
        ids = _ids(tokenizer, texts, seq_len, vocab_size, words=rows.words)
        full = [text for text, x in zip(texts, ids, strict=True) if len(x) == seq_len]
        cut += sum(len(x) > seq_len for x in _ids(tokenizer, full, None, vocab_size, words=rows.words))
        labels = [_label(x, numbers, text, rows) for text, x in zip(texts, part[rows.label], strict=True)]
        return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]

    train, held_out = examples(rows.train), examples(rows.held_out)
    notes = (
        (f"{cut} of {len(train) + len(held_out)} texts are longer than {seq_len} tokens and were cut",) if cut else ()
    )
    return Examples(
        train=train,
        held_out=held_out,
        words=f"{rows.words}: {len(train):,} texts, {len(held_out):,} held out, {len(names)} classes",
        labels=names,
        notes=notes,
    )


def sequence_pairs(rows: Rows, tokenizer: Any, *, seq_len: int, vocab_size: int) -> Examples:
    """Source and target texts, each truncated to `seq_len`."""
    assert rows.label is not None
    if rows.held_out is None:
        raise one_row(rows.words)

    def examples(part: Any) -> list[Example]:
        sources = _ids(tokenizer, rows.texts(part), seq_len, vocab_size, words=rows.words)
        texts = [x or "" for x in part[rows.label]]
        targets = _ids(tokenizer, texts, seq_len, vocab_size, words=rows.words, target=True)
        return [{"input_ids": x, "labels": y} for x, y in zip(sources, targets, strict=True)]

    train, held_out = examples(rows.train), examples(rows.held_out)
    return Examples(
        train=train, held_out=held_out, words=f"{rows.words}: {len(train):,} pairs, {len(held_out):,} held out"
    )


class Stream(Dataset[Example]):
    """`count` examples in a seeded order: every example once, then again in a new order.

    With `mask` set, a share of `MASK_RATE` of each window's tokens is replaced by that id, and the originals become
    labels; the first `keep[0]` and last `keep[1]` tokens are special and are not masked. With `causal`, the labels are
    the tokens themselves, or the next ones if they have to be `shifted`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        count: int,
        *,
        seed: int,
        shuffled: bool = True,
        mask: int | None = None,
        keep: tuple[int, int] = (0, 0),
        causal: bool = False,
        shifted: bool = False,
    ) -> None:
        self.examples, self.seed, self.mask, self.keep = examples, seed, mask, keep
        self.causal, self.shifted = causal, shifted
        self.first_target = int(causal and not shifted)  # place of the first label that is a target
        generator = np.random.default_rng(seed)
        rounds = (
            generator.permutation(len(examples)) if shuffled else np.arange(len(examples)) for _ in itertools.count()
        )
        self.order = np.concatenate(list(itertools.islice(rounds, -(-count // len(examples)))))[:count]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Example:
        example = self.examples[int(self.order[place])]
        if self.mask is not None:
            return self._masked(np.asarray(example["input_ids"]), place)
        if not self.causal:
            return example
        labels = example.get("labels", example["input_ids"])
        return {**example, "labels": np.append(labels[1:], IGNORED) if self.shifted else labels}

    def _masked(self, ids: Any, place: int) -> Example:
        """Mask a window. All windows have the same number of masks, so a mean over windows is a mean over masks."""
        first, last = self.keep[0], len(ids) - self.keep[1]
        count = max(1, round(MASK_RATE * (last - first)))
        chosen = first + np.random.default_rng((self.seed, place)).permutation(last - first)[:count]
        covered, labels = ids.copy(), np.full_like(ids, IGNORED)
        covered[chosen], labels[chosen] = self.mask, ids[chosen]
        return {"input_ids": covered, "labels": labels}


def collate(examples: Sequence[Example], pad_id: int, seq_len: int) -> dict[str, Tensor]:
    """Collate examples into a batch; if lengths differ, pad to a multiple of 8 tokens, but to at most `seq_len`."""
    ids = [x["input_ids"] for x in examples]
    labels = [x["labels"] for x in examples]
    length = _padded_length(ids, seq_len)
    batch = {"input_ids": _stack(ids, length, pad_id)}
    if any(len(x) != length for x in ids):
        batch["attention_mask"] = _stack([np.ones(len(x), dtype=np.int64) for x in ids], length, 0)
    if isinstance(labels[0], int):
        batch["labels"] = torch.tensor(labels)
    else:
        batch["labels"] = _stack(labels, _padded_length(labels, seq_len), IGNORED)
    return batch


def _padded_length(sequences: Sequence[Any], seq_len: int) -> int:
    lengths = {len(x) for x in sequences}
    return lengths.pop() if len(lengths) == 1 else min(-(-max(lengths) // 8) * 8, seq_len)


def _stack(sequences: Sequence[Any], length: int, padding: int) -> Tensor:
    out = torch.full((len(sequences), length), padding, dtype=torch.long)
    for row, x in zip(out, sequences, strict=True):
        row[: len(x)] = torch.as_tensor(np.asarray(x), dtype=torch.long)
    return out


def _ids(
    tokenizer: Any, texts: Sequence[str], seq_len: int | None, vocab_size: int, *, words: str, target: bool = False
) -> list[list[int]]:
    """Token ids of each text, including special tokens, truncated to `seq_len`. Raises InputError if one has none."""
    options: dict[str, Any] = {} if seq_len is None else {"truncation": True, "max_length": seq_len}
    ids: list[list[int]] = []
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        kind = {"text_target": chunk} if target else {"text": chunk}
        ids += token_ids(tokenizer, vocab_size=vocab_size, **kind, **options)
    if empty := sum(not x for x in ids):
        what = "target texts" if target else "texts"
        raise InputError(f"{empty} of {len(ids)} {what} of {words} have no tokens", hint="remove empty rows")
    return ids


def _windows(
    rows: Rows, part: Any, tokenizer: Any, prefix: list[int], suffix: list[int], seq_len: int, vocab_size: int,
    answers: Callable[[Any], list[tuple[list[int], list[bool]]]] | None,
) -> list[Example]:  # fmt: skip
    room = room_for_text(seq_len, prefix, suffix, least=2)
    eos = special_id(tokenizer, "eos")
    end = [] if eos is None or rows.is_chat else [eos]  # a chat template ends its texts itself
    texts = [] if answers else [t for t in rows.texts(part) if t]
    pieces = [] if answers is None else [np.asarray(x).T for turns in part[rows.text] if turns for x in answers(turns)]
    for start in range(0, len(texts), _CHUNK):
        for ids in token_ids(tokenizer, text=texts[start : start + _CHUNK], add_special_tokens=False):
            pieces.append(np.asarray(ids + end if len(texts) > 1 else ids, dtype=np.int64))
    ids = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    labels = None
    if answers and pieces:
        ids, is_answer = ids.T
        labels = np.where(is_answer, ids, IGNORED)
    if len(ids) < room:
        raise _too_short(rows.words, seq_len)
    check_largest_id(max(int(ids.max()), *prefix, *suffix, 0), vocab_size)
    around = (np.asarray(prefix, dtype=np.int64), np.asarray(suffix, dtype=np.int64))
    windows: list[Example] = []
    for i in range(0, len(ids) - room + 1, room):
        window = {"input_ids": np.concatenate([around[0], ids[i : i + room], around[1]])}
        if labels is not None:  # there is nothing before the first token of a window to predict it from
            window["labels"] = np.append(IGNORED, labels[i + 1 : i + room])
        if labels is None or (window["labels"] != IGNORED).any():
            windows.append(window)
    if not windows:
        raise no_answers(rows.words)
    return windows


def _too_short(words: str, seq_len: int) -> InputError:
    return InputError(
        f"{words}: the text is too short for one window of {seq_len} tokens in each part",
        hint="pass more text or a smaller --seq-len",
    )


def _classes(rows: Rows, trained: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """The names of the classes by number, and the number of each label."""
    feature, found = rows.train.features[rows.label], {_scalar(x) for x in rows.train[rows.label] if x is not None}
    names: dict[Any, str]  # by label
    if hasattr(feature, "names"):
        names = dict(enumerate(feature.names))
    elif found and all(isinstance(x, str) for x in found):
        names = {x: x for x in sorted(found)}
    elif found and all(isinstance(x, int) for x in found):
        names = dict(enumerate(trained or map(str, range(max(found) + 1))))
        if out := sorted(found - names.keys()):
            has = f": the model has {len(trained)} classes, 0 to {len(trained) - 1}" if trained else ""
            raise InputError(f"label {out[0]} of {rows.words} is out of range{has}", hint="number classes from 0")
    else:
        raise InputError(
            f"column `{rows.label}` of {rows.words} contains neither class names nor whole numbers",
            hint="pass another --label-column",
        )
    classes = tuple(trained or names.values())
    if len(classes) < 2:
        raise InputError(
            f"column `{rows.label}` of {rows.words} has only one class", hint="training needs at least two classes"
        )
    if unknown := sorted({*names.values()} - {*classes}):
        raise InputError(
            f"label `{unknown[0]}` of {rows.words} is not one of the model's classes: {', '.join(classes):.200}",
            hint="use names or numbers of id2label in config.json; for other classes, take a model without a head",
        )
    return classes, {str(label): classes.index(name) for label, name in names.items()}


def _scalar(value: Any) -> Any:
    """The class name or number of a label, else None. An empty cell of a CSV file turns whole numbers into floats."""
    if isinstance(value, bool | float) and float(value).is_integer():
        return int(value)
    return value if isinstance(value, str | int | float) else None


def _label(value: Any, numbers: Mapping[str, int], text: str, rows: Rows) -> int:
    number = numbers.get(str(_scalar(value)))
    if value is None or number is None:
        is_new = f"label {value!r:.40}, which is not one of the {len(numbers)} training classes"
        raise InputError(
            f"the row of {rows.words} with the text {text!r:.60} has {'no label' if value is None else is_new}",
            hint="label every row; every class must occur in the training data",
        )
    return number
