"""Read files of text, or of rows with text, and check them before a model is opened.

Rows are read by `datasets`, which takes seconds to import; what their columns are is found without it if possible.
"""

import contextlib
import csv
import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, UnsupportedError, UsageError, first_line

TEXT_COLUMNS = ("text", "sentence", "content", "source", "input")
CHAT_COLUMNS = ("messages", "conversations")
QUICK_BYTES = 64 * 2**20  # takes about a second to read
_VISIBLE = re.compile(r"\S")
_LOOKED_AT = 4_000_000  # characters of a text that a check reads
_SPECIAL_TOKENS = 8  # most special tokens that a tokenizer adds to a sequence
_MOST_BYTES = 16  # most bytes per token; longer texts are certainly long enough
SEQ_LEN = 128  # default, if the model has that many positions
# In these models positions start after the padding id, so two positions are unused.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet")

_TOKENIZERS = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip

FILE_KINDS = {
    ".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet",
}  # fmt: skip


def file_kind(path: Path) -> str:
    """``text``, ``json``, ``csv`` or ``parquet`` by the suffix of a file; other files are text."""
    return FILE_KINDS.get(path.suffix.lower(), "text")


def read_text(path: Path, limit: int = -1) -> str:
    """Read a text file, or its first `limit` characters. Raises InputError if it is missing, empty or not UTF-8."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(limit)
    except (FileNotFoundError, IsADirectoryError) as e:
        raise InputError(f"file `{path}` does not exist", hint="pass a text file") from e
    except OSError as e:
        raise InputError(f"cannot read `{path}`: {e.strerror or e}", hint="pass a readable text file") from e
    except UnicodeDecodeError as e:
        raise InputError(
            f"`{path}` is not UTF-8 text", hint="pass a text file, or a Parquet file with the suffix .parquet"
        ) from e
    if not text:
        raise InputError(f"`{path}` is empty", hint="pass a file with text in it")
    return text


def check_text(path: Path, directory: Path, config: Mapping[str, Any], wanted: int | None = None) -> None:
    """Raise as `read_text` does, and InputError for a text shorter than one sequence of the model in `directory`.

    A sequence has `wanted` tokens, or by default the usual number for `config`. The tokens of a short text are counted
    with tokenizer.json; without that file each byte counts as a token, the upper bound. A file of rows only has to be
    there, with a text column if that can be told without `datasets`.
    """
    if file_kind(path) != "text" and path.is_file() and path.stat().st_size:
        columns = columns_of(path)
        if columns is not None:
            check_template(text_column(path, columns), path, directory)
        return
    # `lpconv.models.inputs.sequence_length` also accounts for positions that are not tokens.
    text, seq_len = read_text(path, _LOOKED_AT), wanted or min(SEQ_LEN, num_positions(config) or SEQ_LEN)
    num, unit = len(text.encode()), "bytes"
    if num < _MOST_BYTES * seq_len:
        with contextlib.suppress(Exception):  # damaged files raise arbitrary errors, which tokenising will report
            from tokenizers import Tokenizer  # fast to import, unlike transformers

            counting = Tokenizer.from_file(str(directory / "tokenizer.json"))
            counting.no_truncation()
            counting.no_padding()
            num, unit = len(counting.encode(text).ids), "tokens"
    if num + _SPECIAL_TOKENS < seq_len:
        short = f"`{path}` has {num} {unit}, fewer than one sequence of {seq_len} tokens"
        raise InputError(short, hint="pass a longer text, or a smaller --seq-len if the command has it")


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint has files of a tokenizer."""
    return any((directory / name).exists() for name in _TOKENIZERS)


def check_template(column: str, path: Path, directory: Path) -> None:
    """Raise InputError for conversations if the tokenizer's files in `directory` show that it has no chat template."""
    settings = directory / "tokenizer_config.json"
    if column not in CHAT_COLUMNS or any(directory.glob("*chat_template*")) or not settings.is_file():
        return
    if b"chat_template" not in settings.read_bytes():
        raise InputError(
            f"`{path.name}` has conversations, but the model's tokenizer has no chat template",
            hint="copy chat_template.jinja of its instruction-tuned version next to the weights, or pass texts",
        )


def columns_of(path: Path) -> Sequence[str] | None:
    """Column names from the head of a file, or of all JSON lines, because rows may lack some.

    None if only `datasets` can determine them, whose import takes seconds. Raises InputError for lines that are not
    JSON.
    """
    suffix = path.suffix.lower()
    with contextlib.suppress(OSError, ValueError, TypeError, csv.Error):
        if file_kind(path) == "text":
            return ("text",)
        if suffix in (".csv", ".tsv"):
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = csv.reader(file, delimiter="\t" if suffix == ".tsv" else ",")
                return next((row for row in rows if row), None)
        if suffix == ".jsonl" and path.stat().st_size < QUICK_BYTES:
            return tuple(dict.fromkeys(key for row in _json_rows(path) for key in dict(row)))
    return None


def _json_rows(path: Path) -> Iterator[Any]:
    """The rows of a file of JSON objects, or of arrays of them; like `datasets`, it ignores where lines end."""
    text, decode = path.read_text(encoding="utf-8-sig"), json.JSONDecoder().raw_decode
    end = 0
    while (found := _VISIBLE.search(text, end)) is not None:
        try:
            value, end = decode(text, found.start())
        except json.JSONDecodeError as e:
            raise InputError(
                f"`{path}` cannot be read as json: {e.msg.removesuffix(' at')} in line {e.lineno}",
                hint="check that its suffix matches its contents",
            ) from e
        yield from value if isinstance(value, list) else [value]


def text_column(path: Path, columns: Sequence[str]) -> str:
    """The column with a usual name for texts. Raises InputError if there is none."""
    usual = (*TEXT_COLUMNS, *CHAT_COLUMNS)
    column = next((c for c in usual if c in columns), None)
    if column is None:
        raise InputError(
            f"`{path}` has no text column called {' or '.join(usual)}",
            hint=f"its columns are {', '.join(columns)}",
        )
    return column


def num_positions(config: Mapping[str, Any]) -> int | None:
    """Number of tokens that the model has positions for, or None if config.json has no limit under a usual name.

    XLNet's -1 means no limit.
    """
    unused = 2 if config.get("model_type") in _OFFSET_POSITIONS else 0
    sizes = config.get("text_config") or config
    limits = (sizes.get(key) for key in ("max_position_embeddings", "n_positions"))
    return next((n - unused for n in limits if isinstance(n, int) and n > 0), None)


def check_seq_len(wanted: int | None, limit: int | None) -> None:
    """Raise UsageError if sequences are longer than the model's `limit` of positions; None means no known limit."""
    if wanted is not None and limit is not None and wanted > limit:
        raise UsageError(
            f"--seq-len {wanted} exceeds the model's maximum of {limit} positions", hint=f"pass at most {limit}"
        )


def check_reads_text(config: Mapping[str, Any], *, hint: str, allow_pairs: bool = False) -> None:
    """Raise UnsupportedError if config.json shows that the model does not read token ids alone, or maybe pairs."""
    name = str((config.get("architectures") or ["the model"])[0])
    if config.get("is_encoder_decoder") and not allow_pairs:
        raise UnsupportedError(f"`{name}` is an encoder-decoder model, which lpconv cannot run here", hint=hint)
    if "vocab_size" not in config and {"image_size", "num_mel_bins"} & config.keys() and "text_config" not in config:
        raise UnsupportedError(f"`{name}` does not read text", hint=hint)


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
        raise InputError(
            f"`{path}` cannot be read as {kind}: {first_line(e.__cause__ or e)}",
            hint="check that its suffix matches its contents",
        ) from e
    if len(dataset) == 0:
        raise InputError(f"`{path}` has no rows", hint="pass a file with rows in it")
    return dataset


def text_of(path: Path, limit: int, render: Callable[[Any], str]) -> str:
    """The first `limit` characters of a text file, or of the texts of a file of rows with an empty line between two.

    `render` makes texts of conversations.
    """
    if file_kind(path) == "text":
        return read_text(path, limit)
    rows = read_file(path)
    column = text_column(path, rows.column_names)
    texts, left = list[str](), limit
    for row in rows[column]:
        text = render(row) if row and isinstance(row, list) and left > 0 else row
        if isinstance(text, str) and text.strip() and left > 0:
            texts.append(text)
            left -= len(text) + 2
    if not texts:
        hint = f"its columns are {', '.join(rows.column_names)}"
        raise InputError(f"`{path}` has no text in its column `{column}`", hint=hint)
    return "\n\n".join(texts)[:limit]
