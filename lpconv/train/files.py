"""What can be said of files of training data without `datasets`, which takes seconds to import: are they there, and
what are their columns called."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from lpconv.checkpoint.resolve import looks_like_path
from lpconv.errors import InputError, UsageError
from lpconv.lookup import nearest
from lpconv.train.options import FinetuneOptions

__all__ = ["BUILDERS", "check_data", "choose_columns", "is_file_name"]

# The builder of `datasets` for a file, by how its name ends; others are text.
BUILDERS = {
    ".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet",
}  # fmt: skip
_TEXTS, _LABELS = ("text", "sentence", "content", "source", "input"), ("label", "labels", "target", "output", "summary")
_QUICK_BYTES = 64 * 2**20  # read in about a second


def is_file_name(name: str) -> bool:
    """Whether `--data` means a file, not a data set on the hub."""
    return Path(name).exists() or looks_like_path(name) or Path(name).suffix in BUILDERS


def check_data(options: FinetuneOptions) -> None:
    """Raises InputError for a file that is missing or empty, and UsageError for a column that its head lacks."""
    for name in filter(None, (options.data, options.eval_data)):
        if not is_file_name(name):
            continue
        path = Path(name)
        if not path.is_file():
            raise InputError(f"there is no file `{name}`", hint="pass a file, or the id of a data set on the hub")
        if path.stat().st_size == 0:
            raise InputError(f"`{name}` is empty", hint="pass a file with text in it")
        columns = _columns(path) if name == options.data else None
        if columns is not None:
            choose_columns(columns, options)


def choose_columns(columns: Sequence[str], options: FinetuneOptions) -> tuple[str, str | None]:
    """The columns of texts and of labels, by their usual names where nobody says. UsageError for one not there."""
    name = str(options.data)
    text = _column(columns, options.text_column, _TEXTS, name)
    if text is None:
        raise UsageError(
            f"`{name}` has no column of texts that is called {' or '.join(_TEXTS)}",
            hint=f"--text-column, one of: {', '.join(columns)}",
        )
    return text, _column(columns, options.label_column, _LABELS, name)


def _column(columns: Sequence[str], wanted: str | None, usual: Sequence[str], name: str) -> str | None:
    if wanted is None:
        return next((c for c in usual if c in columns), None)
    if wanted in columns:
        return wanted
    near = nearest(wanted, columns)
    hint = f"did you mean `{near}`?" if near else "columns: " + ", ".join(columns)
    raise UsageError(f"`{name}` has no column `{wanted}`", hint=hint)


def _columns(path: Path) -> Sequence[str] | None:
    """What the head of a file calls its columns; None where only `datasets` can tell, or say what is wrong."""
    suffix = path.suffix.lower()
    try:
        if BUILDERS.get(suffix, "text") == "text":
            return ("text",)
        if suffix in (".csv", ".tsv"):
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = csv.reader(file, delimiter="\t" if suffix == ".tsv" else ",")
                return next((row for row in rows if row), None)
        if suffix == ".jsonl" and path.stat().st_size < _QUICK_BYTES:
            return _keys(path)
    except (OSError, ValueError, TypeError, csv.Error):
        pass
    return None


def _keys(path: Path) -> Sequence[str]:
    """The keys of all rows, as `datasets` unites them: a row may lack some."""
    with path.open(encoding="utf-8") as file:
        return tuple({key: None for line in file if line.strip() for key in dict(json.loads(line))})
