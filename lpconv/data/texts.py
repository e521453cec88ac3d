"""Read files of text, or of rows with text, and check them before a model is opened.

Rows are read by `datasets`, which takes seconds to import; what their columns are is found without it if possible.
"""

import contextlib
import csv
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, UnsupportedError, UsageError, first_line

TEXT_COLUMNS = ("text", "sentence", "content", "source", "input")
CHAT_COLUMNS = ("messages", "conversations")
QUICK_BYTES = 2**24  # takes a quarter of a second to read
_START = 2**23  # characters of a larger file of JSON lines, to find its columns; `datasets` infers them from 10 MB
_VISIBLE = re.compile(r"\S")
_LOOKED_AT = 4_000_000  # characters of a text that a check reads
_SPECIAL_TOKENS = 8  # most special tokens that a tokenizer adds to a sequence
_SAMPLE = 2**16  # characters of a long text whose ids a check looks at
_MOST_BYTES = 16  # most bytes per token; longer texts are certainly long enough
SEQ_LEN = 128  # default, if the model has that many positions
_LONGER = "pass more text, or a smaller --seq-len"
# In these models positions start after the padding id, so two positions are unused.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet")
_OF_SOUND = {"num_mel_bins", "input_feat_per_channel", "feat_extract_norm"}  # settings of models that read sound
_TOKENIZERS = (
    "tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip

Rows = Sequence[Mapping[str, Any]]
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
    except FileNotFoundError as e:
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


def check_text(
    path: Path, directory: Path, config: Mapping[str, Any], wanted: int | None = None, *, parts: int = 1,
    hint: str = _LONGER,
) -> None:  # fmt: skip
    """Raise as `read_text` and `quick_rows` do, and as `check_rows` and `check_length` for the model in `directory`."""
    if file_kind(path) == "text" or not path.is_file() or not path.stat().st_size:
        check_length([read_text(path, _LOOKED_AT)], path, directory, config, wanted, parts=parts, hint=hint)
        return
    rows, columns = quick_rows(path)
    column = text_column(path, columns) if columns else ""
    if rows and (texts := check_rows(rows, column, path, directory)):
        check_length(texts, path, directory, config, wanted, parts=parts, hint=hint)


def check_length(
    texts: Sequence[str], path: Path, directory: Path, config: Mapping[str, Any], wanted: int | None, *,
    parts: int = 1, hint: str = _LONGER,
) -> None:  # fmt: skip
    """Raise InputError for texts with fewer tokens than `parts` sequences, or with ids that the model does not embed.

    A sequence has `wanted` tokens, or by default the usual number for `config`. The tokens of short texts are counted
    with tokenizer.json; without that file each byte counts as a token, the upper bound.
    """
    # `lpconv.models.inputs.sequence_length` also accounts for positions that are not tokens.
    seq_len = wanted or min(SEQ_LEN, num_positions(config) or SEQ_LEN)
    needed = parts * (seq_len - _SPECIAL_TOKENS) - 2 * (len(texts) - 1)  # an end or an empty line between two texts
    num, unit = sum(len(x.encode()) for x in texts), "bytes"
    is_short, vocab_size = num < _MOST_BYTES * needed, (config.get("text_config") or config).get("vocab_size")
    if is_short or _has_more_ids(directory, vocab_size):
        ids = _ids(texts if is_short else [texts[0][:_SAMPLE]], directory)
        if ids is not None and isinstance(vocab_size, int):
            check_largest_id(max(ids, default=0), vocab_size)
        if ids is not None and is_short:
            num, unit = len(ids), "tokens"
    if num < needed:
        sequences = "one sequence" if parts == 1 else "two sequences, one of them held out,"
        raise InputError(
            f"`{path}` has {num} {unit}, fewer than {sequences} of {seq_len} tokens",
            hint=hint,
        )


def _ids(texts: Sequence[str], directory: Path) -> list[int] | None:
    """All token ids of some texts by tokenizer.json; None if it cannot be used."""
    with contextlib.suppress(Exception):  # damaged files raise arbitrary errors, which tokenising will report
        from tokenizers import Tokenizer  # fast to import, unlike transformers

        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return [i for one in tokenizer.encode_batch([*texts]) for i in one.ids]
    return None


def _has_more_ids(directory: Path, vocab_size: object) -> bool:
    """Whether tokenizer.json has ids beyond the model's; texts need not contain them."""
    with contextlib.suppress(Exception):
        settings = json.loads((directory / "tokenizer.json").read_bytes())
        last = max(len(settings["model"]["vocab"]), *(x["id"] + 1 for x in settings["added_tokens"]))
        return isinstance(vocab_size, int) and last > vocab_size
    return False


def check_largest_id(largest: int, vocab_size: int) -> None:
    """Raise InputError if a vocabulary of `vocab_size` does not include the largest id."""
    if largest >= vocab_size:
        raise InputError(
            f"the tokenizer makes ids up to {largest}, but the model has {vocab_size} embeddings",
            hint="the tokenizer belongs to another model",
        )


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint has files of a tokenizer."""
    return any((directory / name).exists() for name in _TOKENIZERS)


def check_tokenizer(*directories: Path) -> None:
    """Raise InputError unless one of the checkpoints has files of a tokenizer."""
    if not any(map(has_tokenizer, directories)):
        who = "neither checkpoint has a" if len(directories) > 1 else f"`{directories[0].name}` has no"
        raise InputError(f"{who} tokenizer to read the text with", hint="copy its files next to the weights")


def check_rows(rows: Rows, column: str, path: Path, directory: Path) -> list[str]:
    """The texts of rows; empty for conversations that the chat template in `directory` can show.

    Raises InputError for rows with neither, and for a template that lacks what they need. It is read as text, without
    transformers.
    """
    texts, conversations = texts_in(rows, column), conversations_in(rows, column)
    if not texts and not conversations:
        raise InputError(f"column `{column}` of `{path.name}` has no text", hint="pass a file whose column has texts")
    settings = [directory / "tokenizer_config.json", *directory.glob("*chat_template*")]
    template = "".join(p.read_text(encoding="utf-8", errors="replace") for p in settings if p.is_file())
    if conversations and len(settings) == 1 and "chat_template" not in template:
        raise InputError(
            f"`{path.name}` has conversations, but the model's tokenizer has no chat template",
            hint="copy chat_template.jinja of its instruction-tuned version next to the weights, or pass texts",
        )
    for turns in conversations:
        check_turns(turns, template, path.name)
    return texts


def check_turns(turns: Sequence[Mapping[str, Any]], template: str, name: str) -> None:
    """Raise InputError for turns of which a chat template would silently leave out a part that is not text."""
    for turn in turns:
        parts = turn.get("content", turn.get("value"))
        kinds = [str(x.get("type")) for x in parts if isinstance(x, Mapping)] if isinstance(parts, list) else []
        kinds += ["tool_calls"] if turn.get("tool_calls") and "tool_calls" not in template else []
        if kind := next((x for x in kinds if x != "text"), None):
            raise InputError(
                f"a conversation of `{name}` has `{kind}`, which lpconv cannot make a text of: {turn!r:.80}",
                hint="leave such conversations out; tool calls need a chat template that mentions tool_calls",
            )


def conversations_in(rows: Rows, column: str) -> list[list[Mapping[str, Any]]]:
    """The turns of the conversations in a column, without empty ones."""
    turns = ([x for x in row[column] if isinstance(x, Mapping)] for row in rows if isinstance(row.get(column), list))
    return [x for x in turns if x]


def texts_in(rows: Rows, column: str) -> list[str]:
    """The texts of a column, without empty ones."""
    return [x for row in rows if isinstance(x := row.get(column), str) and x.strip()]


def columns_of(rows: Rows) -> Sequence[str]:
    """The columns that any of the rows has."""
    return tuple(dict.fromkeys(key for row in rows for key in row if key is not None))


def quick_rows(path: Path) -> tuple[Rows | None, Sequence[str]]:
    """The rows of a file by column, and the columns; None or empty if only `datasets` can tell, which takes seconds.

    Columns of Parquet and of large files are read from the schema, the header or the first lines. Raises InputError for
    a file without rows, and for lines that are not JSON.
    """
    kind, rows, columns = file_kind(path), None, list[str]()
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with contextlib.suppress(ImportError, OSError, ValueError, TypeError, csv.Error):
        is_small = path.stat().st_size < QUICK_BYTES
        if kind == "parquet":
            from pyarrow.parquet import read_schema  # fast to import, unlike datasets

            try:
                columns = read_schema(path).names
            except ValueError as e:
                raise _unreadable(path, kind, first_line(e)) from e
        elif kind == "json" and is_small:
            rows = [*map(dict, _json_rows(path))]
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                lines = itertools.dropwhile(str.isspace, file)
                if kind == "json":  # a file of one long line is an array
                    columns = [*columns_of([*map(dict, map(json.loads, file.read(_START).split("\n")[:-1]))])]
                elif is_small:
                    rows = [*csv.DictReader(lines, delimiter=delimiter)]
                else:
                    columns = next(csv.reader(lines, delimiter=delimiter))
    if rows == []:
        raise InputError(f"`{path}` has no rows", hint="pass a file with rows in it")
    return rows, columns_of(rows) if rows else columns


def _unreadable(path: Path, kind: str, why: str) -> InputError:
    return InputError(f"`{path}` cannot be read as {kind}: {why}", hint="check that its suffix matches its contents")


def _json_rows(path: Path) -> Iterator[Any]:
    """The rows of a file of JSON objects, or of arrays of them; like `datasets`, it ignores where lines end."""
    text, decode = path.read_text(encoding="utf-8-sig"), json.JSONDecoder().raw_decode
    end = 0
    while (found := _VISIBLE.search(text, end)) is not None:
        try:
            value, end = decode(text, found.start())
        except json.JSONDecodeError as e:
            raise _unreadable(path, "json", f"{e.msg.removesuffix(' at')} in line {e.lineno}") from e
        yield from value if isinstance(value, list) else [value]


def text_column(path: Path, columns: Sequence[str]) -> str:
    """The column with a usual name for texts. Raises InputError if there is none."""
    usual = (*TEXT_COLUMNS, *CHAT_COLUMNS)
    column = next((c for c in usual if c in columns), None)
    if column is None:
        raise InputError(
            f"`{path}` has no column called {', '.join(usual[:-1])} or {usual[-1]}",
            hint=f"its columns are {', '.join(columns)}: rename the one with the text to `text`",
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
    is_image = "image_size" in config and "vocab_size" not in config
    if (is_image or config.keys() & _OF_SOUND) and "text_config" not in config:
        raise UnsupportedError(f"`{name}` does not read text", hint=hint)
    if config.get("is_encoder_decoder") and not allow_pairs:
        raise UnsupportedError(f"`{name}` is an encoder-decoder model, which lpconv cannot run here", hint=hint)


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
        raise _unreadable(path, kind, first_line(e.__cause__ or e)) from e
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
