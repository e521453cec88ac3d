"""Files of text and of rows with text, as `datasets` reads them. It takes seconds to import, and only reading does."""

import functools
import logging
from pathlib import Path
from typing import Any

from lpconv.data import file_kind, read_text, text_column
from lpconv.errors import InputError


@functools.cache
def datasets_library() -> Any:
    """The library with progress bars and logging turned off; our errors contain what it would log."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets


def read_file(path: Path) -> Any:
    """The rows of a file; a plain text is one row. Raises InputError if it is unreadable or empty."""
    kind = file_kind(path)
    if kind == "text":  # lines are not documents
        return datasets_library().Dataset.from_dict({"text": [read_text(path)]})
    options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    try:
        dataset = datasets_library().load_dataset(kind, data_files=str(path), split="train", **options)
    except Exception as e:  # each builder raises its own
        cause = e.__cause__ or e
        why = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise InputError(
            f"`{path}` cannot be read as {kind}: {why}", hint="check that its suffix matches its contents"
        ) from e
    if len(dataset) == 0:
        raise InputError(f"`{path}` has no rows", hint="pass a file with rows in it")
    return dataset


def text_of(path: Path, limit: int) -> str:
    """The first `limit` characters of a text file, or of the texts of a file of rows with an empty line between two."""
    if file_kind(path) == "text":
        return read_text(path, limit)
    rows = read_file(path)
    column = text_column(path, rows.column_names)
    texts, left = list[str](), limit
    for text in rows[column]:
        if isinstance(text, str) and text.strip() and left > 0:
            texts.append(text)
            left -= len(text) + 2
    if not texts:
        hint = f"its columns are {', '.join(rows.column_names)}"
        raise InputError(f"`{path}` has no text in its column `{column}`", hint=hint)
    return "\n\n".join(texts)[:limit]
