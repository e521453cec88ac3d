"""Rows of text from files, the hub or the package, through `datasets`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from lpconv.checkpoint.resolve import looks_like_path
from lpconv.data import demo_text
from lpconv.errors import InputError, UsageError
from lpconv.lookup import nearest
from lpconv.train.options import FinetuneOptions

__all__ = ["Rows", "read_rows"]

_BUILDERS = {
    ".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet",
}  # fmt: skip
_HELD_OUT = 10  # one row in so many is held out where nobody says which
_TEXTS, _LABELS = ("text", "sentence", "content", "source", "input"), ("label", "labels", "target", "output", "summary")


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
    train, held_out = _splits(options.data)
    if options.eval_data is not None:
        held_out = _splits(options.eval_data)[0]
    text = _column(train, options.text_column, _TEXTS, options.data)
    if text is None:
        raise UsageError(
            f"`{options.data}` has no column of texts that is called {' or '.join(_TEXTS)}",
            hint=f"--text-column, one of: {', '.join(train.column_names)}",
        )
    label = _column(train, options.label_column, _LABELS, options.data)
    for part, name in ((train, options.data), (held_out, options.eval_data or options.data)):
        if part is not None:
            _check(part, text, label, name)
    if held_out is None and len(train) >= 2:
        parts = train.train_test_split(test_size=max(1, len(train) // _HELD_OUT), seed=0)
        train, held_out = parts["train"], parts["test"]
    return Rows(train=train, held_out=held_out, text=text, label=label, words=Path(options.data).name)


def _splits(name: str) -> tuple[Any, Any | None]:
    """The training part of a file or hub data set, and its held-out part if it has one."""
    if Path(name).exists() or looks_like_path(name) or Path(name).suffix in _BUILDERS:
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
    if not path.is_file():
        raise InputError(f"there is no file `{name}`", hint="pass a file, or the id of a data set on the hub")
    if path.stat().st_size == 0:
        raise InputError(f"`{name}` is empty", hint="pass a file with text in it")
    builder = _BUILDERS.get(path.suffix.lower(), "text")
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


def _column(rows: Any, wanted: str | None, usual: Sequence[str], name: str) -> str | None:
    if wanted is None:
        return next((c for c in usual if c in rows.column_names), None)
    if wanted in rows.column_names:
        return wanted
    near = nearest(wanted, rows.column_names)
    hint = f"did you mean `{near}`?" if near else "columns: " + ", ".join(rows.column_names)
    raise UsageError(f"`{name}` has no column `{wanted}`", hint=hint)


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
