"""Rows of text from files, the hub or the package, through `datasets`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from lpconv.data import demo_text
from lpconv.errors import InputError, UsageError
from lpconv.train.files import BUILDERS, check_data, choose_columns, is_file_name
from lpconv.train.options import FinetuneOptions

__all__ = ["Rows", "read_rows"]

_HELD_OUT = 10  # one row in so many is held out where nobody says which


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Texts, their labels where a column of them was found or asked for, and what they are in words.

    `held_out` is None where the rows are one text, to be cut later.
    """

    train: Any
    held_out: Any | None
    text: str
    label: str | None
    words: str

    def texts(self, part: Any) -> list[str]:
        """The texts of a part, "" for missing ones."""
        return [x if x is not None else "" for x in part[self.text]]


def read_rows(options: FinetuneOptions) -> Rows:
    """The data that `options` name.

    Raises InputError for what is missing, unreadable or empty, with the rows or columns at fault, and UsageError for
    columns that are not there.
    """
    if options.data is None:
        parts = {split: _read(str(demo_text(split))) for split in ("train", "heldout")}
        return Rows(
            train=parts["train"],
            held_out=parts["heldout"],
            text="text",
            label=None,
            words="plays that ship with lpconv",
        )
    check_data(options)
    train, held_out = _splits(options.data)
    if options.eval_data is not None:
        held_out = _splits(options.eval_data)[0]
    text, label = choose_columns(train.column_names, options)
    for part, name in ((train, options.data), (held_out, options.eval_data or options.data)):
        if part is not None:
            _check(part, text, label, name)
    if held_out is None and len(train) >= 2:
        parts = train.train_test_split(test_size=max(1, len(train) // _HELD_OUT), seed=0)
        train, held_out = parts["train"], parts["test"]
    return Rows(train=train, held_out=held_out, text=text, label=label, words=Path(options.data).name)


def _splits(name: str) -> tuple[Any, Any | None]:
    """The training part of a file or hub data set, and its held-out part if it has one."""
    if is_file_name(name):
        return _read(name), None
    try:
        found = datasets.load_dataset(name)
    except Exception as e:  # datasets raises a dozen kinds, connection errors among them
        raise InputError(
            f"cannot get the data set `{name}`: {str(e).splitlines()[0] if str(e) else type(e).__name__}",
            hint="offline it must be in the cache; a local file is known by its ending, such as .jsonl",
        ) from e
    train = found.get("train") or next(iter(found.values()))
    return train, next((found[s] for s in ("validation", "test") if s in found), None)


def _read(name: str) -> Any:
    path = Path(name)
    builder = BUILDERS.get(path.suffix.lower(), "text")
    if builder == "text":  # one text: lines are not documents
        return datasets.Dataset.from_dict({"text": [_read_text(path)]})
    options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    try:
        found = datasets.load_dataset(builder, data_files=str(path), split="train", **options)
    except Exception as e:  # each builder has its own
        cause = e.__cause__ or e
        why = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise InputError(f"`{name}` does not read as {builder}: {why}", hint="is the ending of its name right?") from e
    if len(found) == 0:
        raise InputError(f"`{name}` has no rows", hint="pass a file with rows in it")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(f"cannot read `{path}`: {e.strerror or e}", hint="pass a readable file to --data") from e
    except UnicodeDecodeError as e:
        raise InputError(f"`{path}` is no UTF-8 text", hint="pass a text file, or one that ends in .parquet") from e


def _check(rows: Any, text: str, label: str | None, name: str) -> None:
    for column in filter(None, (text, label)):
        if column not in rows.column_names:
            raise UsageError(f"`{name}` has no column `{column}`", hint="columns: " + ", ".join(rows.column_names))
    odd = next((i for i, x in enumerate(rows[text]) if x is not None and not isinstance(x, str)), None)
    if odd is not None:
        raise InputError(
            f"column `{text}` of `{name}` is no text: row {odd} is {rows[text][odd]!r:.60}", hint="--text-column"
        )
    if not any(x and x.strip() for x in rows[text]):
        raise InputError(f"column `{text}` of `{name}` has no text", hint="--text-column names another")
