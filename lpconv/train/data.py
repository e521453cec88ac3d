"""Data of a fine-tuning: files, their columns, and rows of text from files, the hub or the package.

`datasets` takes seconds to import and is imported only to read rows: checking files and their columns does not need it.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpconv.data import demo_text
from lpconv.data.texts import (
    CHAT_COLUMNS,
    FILE_KINDS,
    QUICK_BYTES,
    TEXT_COLUMNS,
    check_length,
    check_rows,
    check_text,
    columns_of,
    conversations_in,
    datasets_library,
    file_kind,
    quick_rows,
    read_file,
    read_text,
)
from lpconv.errors import InputError, UsageError, first_line
from lpconv.lookup import nearest
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.hub import why_unreachable
from lpconv.storage.resolve import looks_like_path
from lpconv.train.options import FinetuneOptions, task_in

_TARGETS = ("target", "output", "summary")  # may be classes or texts
_LABELS = ("label", "labels", *_TARGETS)
_PAIR = {"prompt", "completion"}
_CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel")
_LANGUAGE_MODELS = (*_CAUSAL_MODELS, "ForMaskedLM")
_OFFLINE_HINT = "offline, a data set must be in the cache; local files need a known suffix, such as .jsonl"


def _is_file_name(name: str) -> bool:
    """Whether `--data` is a file rather than a data set on the hub."""
    return Path(name).exists() or looks_like_path(name) or Path(name).suffix in FILE_KINDS


def is_text(name: str) -> bool:
    """Whether `--data` is a plain text."""
    return _is_file_name(name) and file_kind(Path(name)) == "text"


def check_data(options: FinetuneOptions, model: Checkpoint | None = None) -> None:
    """Validate the data options without importing `datasets`, for a model if it is known.

    Raises InputError for a file that is missing, empty, not text or too short, or an unavailable data set; UsageError
    for a column that is missing, given without data or ambiguous.
    """
    task = options.task if model is None else task_in(model.config, options.task)
    if options.data is None:
        named = {"--text-column": options.text_column, "--label-column": options.label_column}
        if flag := next((flag for flag, column in named.items() if column), None):
            raise UsageError(f"{flag} needs a data file", hint="pass the file to --data")
        check_labels(task, None)
    for name in filter(None, (options.data, options.eval_data)):
        if not _is_file_name(name):
            _check_within_reach(name)
            continue
        path = Path(name)
        if not path.is_file():
            raise InputError(f"file `{name}` does not exist", hint="pass a file, or the id of a data set on the hub")
        if path.stat().st_size == 0:
            raise InputError(f"`{name}` is empty", hint="pass a file with text in it")
        parts = 2 if options.eval_data is None else 1
        if is_text(name):
            read_text(path, QUICK_BYTES)
            if model is not None:
                check_text(path, model.directory, model.config, options.seq_len, parts=parts)
            continue
        rows, columns = quick_rows(path)
        if columns and name == options.data:
            text, label = _choose_columns(columns, replace(options, task=task))
            if rows and model is not None:
                _check_rows(rows, text, label, replace(options, task=task), model, parts)


def _check_rows(
    rows: Sequence[Mapping[str, Any]], text: str, label: str | None, options: FinetuneOptions, model: Checkpoint,
    parts: int,
) -> None:  # fmt: skip
    """Raise an error for rows that cannot train a model, as far as config.json and tokenizer.json tell."""
    path, drawn = Path(str(options.data)), str((model.config.get("architectures") or [""])[0])
    check_guess(options, drawn, label, [row[label] for row in rows if label and label in row])
    has_labels = options.task in ("classification", "seq2seq") or (options.task == "auto" and label is not None)
    if has_labels and len(rows) < parts:
        raise one_row(path.name)
    if text == CHAT_COLUMNS[0] and text not in columns_of(rows):
        rows = [{text: _turns(row.get("prompt"), row.get("completion"))} for row in rows]
    texts = check_rows(rows, text, path, model.directory)
    if texts and not has_labels:
        check_length(texts, path, model.directory, model.config, options.seq_len, parts=parts)
    roles = {x.get("role", x.get("from")) for turns in conversations_in(rows, text) for x in turns}
    if roles and not roles & {"assistant", "gpt"} and not has_labels and drawn.endswith(_CAUSAL_MODELS):
        raise no_answers(path.name)


def one_row(name: str) -> InputError:
    return InputError(f"`{name}` has only one row", hint="add rows, or pass --eval-data")


def no_answers(name: str) -> InputError:
    return InputError(f"`{name}` has no answers of an assistant", hint="pass conversations with their answers")


def _check_within_reach(name: str) -> None:
    """Raise InputError for a data set that is not cached when the hub is unreachable.

    `datasets` would take seconds to import, and would retry.
    """
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")).expanduser()
    wanted = _plain(name.rpartition("/")[2])
    if any(wanted == _plain(p.name.rpartition("___")[2]) for p in cache.glob("*")):
        return
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else why_unreachable(constants.ENDPOINT)
    if why is not None:
        raise InputError(f"cannot load the data set `{name}`: it is not in the cache, and {why}", hint=_OFFLINE_HINT)


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())  # the cache encodes capitals differently


def _choose_columns(columns: Sequence[str], options: FinetuneOptions) -> tuple[str, str | None]:
    """The columns of texts and labels, by their usual names unless given. Raises UsageError if one is missing."""
    name = str(options.data)
    usual = (*TEXT_COLUMNS, *CHAT_COLUMNS)
    text = _column((*columns, *CHAT_COLUMNS[: {*columns} >= _PAIR]), options.text_column, usual, name)
    if text is None:
        raise UsageError(
            f"`{name}` has no text column called {' or '.join(usual)}, nor prompt and completion",
            hint=f"pass --text-column with one of: {', '.join(columns)}",
        )
    label = _column(columns, options.label_column, _LABELS, name)
    check_labels(options.task, label)
    return text, label


def with_template(rows: "Rows", tokenizer: Any) -> "Rows":
    """The rows, with conversations as texts and tokens by the tokenizer's chat template, which must exist."""
    if not rows.is_chat:
        return rows
    from lpconv.models.tokenizer import answer_tokens, chat_text  # imports torch and transformers (seconds)

    chat_text(tokenizer, rows.first_text, rows.words)
    return replace(
        rows,
        render=lambda turns: chat_text(tokenizer, turns, rows.words),
        answers=lambda turns: answer_tokens(tokenizer, turns, rows.words),
    )


def _with_turns(rows: Any) -> Any:
    """The rows; if they have a prompt and a completion, also with these as the turns of a conversation."""
    if not {*rows.column_names} >= _PAIR or CHAT_COLUMNS[0] in rows.column_names:
        return rows
    return rows.add_column(CHAT_COLUMNS[0], [*map(_turns, rows["prompt"], rows["completion"])])


def _turns(prompt: Any, completion: Any) -> list[Any] | None:
    """A conversation of a prompt and its completion, each a text or turns; None if one is missing."""
    sides = {"user": prompt, "assistant": completion}
    turns = [x if isinstance(x, list) else [{"role": role, "content": x}] for role, x in sides.items()]
    return None if None in (prompt, completion) else turns[0] + turns[1]


def check_guess(options: FinetuneOptions, architecture: str, label: str | None, labels: Sequence[Any] = ()) -> None:
    """Raise UsageError if a language model could learn to classify, or to write, what a guessed column holds."""
    texts = [x for x in labels if isinstance(x, str)]
    own = "mlm" if architecture.endswith("ForMaskedLM") else "clm"
    is_text = label in _TARGETS or len(set(texts)) > max(2, len(texts) / 2)
    if is_text and options.task == "auto" and not options.label_column and architecture.endswith(_LANGUAGE_MODELS):
        raise UsageError(
            f"column `{label}` of `{options.data}` may hold classes or texts, and `{architecture}` could learn either",
            hint=f"pass --task classification, or --task {own} --text-column NAME; to learn both, join the columns",
        )


def check_labels(task: str, label: str | None) -> None:
    """Raise UsageError for classification without a label column, and for pairs without target texts."""
    what = {"classification": "a label column", "seq2seq": "a column with target texts"}.get(task)
    if what is not None and label is None:
        raise UsageError(f"{task} needs {what}", hint="pass --data FILE and --label-column NAME")


def _column(columns: Sequence[str], wanted: str | None, usual: Sequence[str], name: str) -> str | None:
    if wanted is None:
        return next((c for c in usual if c in columns), None)
    if wanted in columns:
        return wanted
    near = nearest(wanted, columns)
    hint = f"did you mean `{near}`?" if near else "its columns are " + ", ".join(columns)
    raise UsageError(f"`{name}` has no column `{wanted}`", hint=hint)


HELD_OUT = 10  # by default, one row in ten is held out


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of text, with labels if a column of them exists, and a description.

    `held_out` is None if the rows are a single text, which is cut later. Conversations need `render` to become texts,
    and `answers` for the tokens of an assistant (`lpconv.models.tokenizer.answer_tokens`).
    """

    train: Any
    held_out: Any | None
    text: str
    label: str | None
    words: str
    render: Callable[[Any], str] = str
    answers: Callable[[Any], list[tuple[list[int], list[bool]]]] | None = None

    @property
    def first_text(self) -> Any:
        """The first text or conversation that is not empty; None if all are."""
        return next((x for row in self.train if (x := row[self.text])), None)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.first_text, list)

    def texts(self, part: Any) -> list[str]:
        """The texts of a part, with "" for missing or empty ones."""
        return [self.render(x) if x else "" for x in part[self.text]]

    def guess(self, task: str) -> str | None:
        """The task and the columns that it uses in words, or None if there is only one column."""
        used = [self.text, *([self.label] if self.label and task in ("classification", "seq2seq") else ())]
        unused = ", ".join(c for c in self.train.column_names if c not in used)
        words = f"task {task} on {' and '.join(used)}{unused and f', not {unused}'}"
        has_choice = len(self.train.column_names) > 1
        return f"{words}; --task, --text-column and --label-column change this" if has_choice else None


def read_rows(options: FinetuneOptions) -> Rows:
    """Read the data named in `options`.

    Raises InputError for missing, unreadable or empty data, with the affected rows or columns, and UsageError for
    missing columns.
    """
    if options.data is None:
        parts = {split: read_file(demo_text(split)) for split in ("train", "heldout")}
        return Rows(train=parts["train"], held_out=parts["heldout"], text="text", label=None, words="the sample text")
    train, held_out = _splits(options.data)
    if options.eval_data is not None:
        held_out = _splits(options.eval_data)[0]
    text, label = _choose_columns(train.column_names, options)
    for part, name in ((train, options.data), (held_out, options.eval_data or options.data)):
        if part is not None:
            _check(part, text, label, name)
    if held_out is None and len(train) >= 2:
        parts = train.train_test_split(test_size=max(1, len(train) // HELD_OUT), seed=0)
        train, held_out = parts["train"], parts["test"]
    return Rows(train=train, held_out=held_out, text=text, label=label, words=Path(options.data).name)


def _splits(name: str) -> tuple[Any, Any | None]:
    """(training part, held-out part or None) of a file or a data set on the hub."""
    if _is_file_name(name):
        return _with_turns(read_file(Path(name))), None
    try:
        dataset = datasets_library().load_dataset(name)
    except Exception as e:  # datasets raises many kinds, including connection errors
        raise InputError(f"cannot load the data set `{name}`: {first_line(e)}", hint=_OFFLINE_HINT) from e
    train = dataset.get("train") or next(iter(dataset.values()))
    held_out = next((dataset[s] for s in ("validation", "test") if s in dataset), None)
    return _with_turns(train), None if held_out is None else _with_turns(held_out)


def _check(rows: Any, text: str, label: str | None, name: str) -> None:
    for column in filter(None, (text, label)):
        _column(rows.column_names, column, (), name)
        try:
            list(rows[column])  # Arrow loads bytes unchecked and decodes on access
        except UnicodeDecodeError as e:
            raise InputError(
                f"column `{column}` of `{name}` is not UTF-8 text", hint="save it as UTF-8 or as .parquet"
            ) from e
    # Lists are conversations; the values of a column are all of one type.
    odd = next((i for i, x in enumerate(rows[text]) if x is not None and not isinstance(x, (str, list))), None)
    if odd is not None:
        raise InputError(
            f"column `{text}` of `{name}` is not text: row {odd} is {rows[text][odd]!r:.60}",
            hint="pass the text column with --text-column",
        )
    if not any(x and str(x).strip() for x in rows[text]):
        raise InputError(f"column `{text}` of `{name}` is empty", hint="pass another --text-column")
