"""What ships with lpconv: a tiny checkpoint that this project trained, and public-domain text to train and test it on.

Both are ordinary files inside the package, so a plain path to them works from an installed wheel. `README.md` beside
this file says where they come from; `benchmarks/reproduce/train_demo.py` makes the checkpoint again.
"""

import contextlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from lpconv.errors import InputError
from lpconv.lookup import find

__all__ = ["SEQ_LEN", "check_text", "demo_checkpoint", "demo_text", "read_text", "text_at", "usual_seq_len"]

_LOOKED_AT = 4_000_000  # characters of a text that a check reads
_SPECIAL_TOKENS = 8  # that a tokenizer adds, at most
_MOST_BYTES = 16  # of a token, in texts of which nobody doubts that they are long enough
SEQ_LEN = 128  # where nobody says and the model has as many positions

TEXTS = {"train": "train.txt", "heldout": "heldout.txt"}


def demo_checkpoint() -> Path:
    """The directory of the demo checkpoint: a byte-level Llama in Hugging Face form, fp32 safetensors, tied embeddings.

    `metrics.json` in it holds the figures of its training, held-out bits per byte first.
    """
    return Path(str(files(__name__) / "demo"))


def text_at(name: str) -> Path:
    """The text file that a name stands for: a path, or ``demo``, the plays that the demo checkpoint trained on."""
    return demo_text("train") if name == "demo" else Path(name)


def read_text(path: Path, limit: int = -1) -> str:
    """A text file, or its first `limit` characters. Raises InputError for one that is missing, empty or no UTF-8."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(limit)
    except (FileNotFoundError, IsADirectoryError) as e:
        raise InputError(f"there is no file `{path}`", hint="pass a text file") from e
    except OSError as e:
        raise InputError(f"cannot read `{path}`: {e.strerror or e}", hint="pass a readable text file") from e
    except UnicodeDecodeError as e:
        raise InputError(f"`{path}` is no UTF-8 text", hint="pass a text file, or one that ends in .parquet") from e
    if not text:
        raise InputError(f"`{path}` is empty", hint="pass a file with text in it")
    return text


def check_text(path: Path, seq_len: int = 1, *, tokenizer: Path | None = None) -> None:
    """Raise as `read_text` does, and InputError for a text that is too short for one sequence of `seq_len` tokens.

    Of tokens nothing is known but that each is a byte at least; with the file of a `tokenizer`, a tokenizer.json, those
    of a short text are counted.
    """
    text = read_text(path, _LOOKED_AT)
    num, unit = len(text.encode()), "bytes"
    if tokenizer is not None and num < _MOST_BYTES * seq_len:
        with contextlib.suppress(Exception):  # damaged files raise anything at all: who tokenises says what is wrong
            from tokenizers import Tokenizer  # imported at once, unlike transformers

            counting = Tokenizer.from_file(str(tokenizer))
            counting.no_truncation()
            counting.no_padding()
            num, unit = len(counting.encode(text).ids), "tokens"
    if num + _SPECIAL_TOKENS < seq_len:
        short = f"`{path}` has {num} {unit}, fewer than one sequence of {seq_len} tokens"
        raise InputError(short, hint="pass a longer text, or shorter sequences by --seq-len")


def usual_seq_len(config: Mapping[str, Any], wanted: int | None) -> int:
    """`wanted` tokens, by default 128 or the positions that config.json says the model has.

    `lpconv.models.inputs.sequence_length` also knows positions that are no tokens, from the config of transformers.
    """
    found = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    return wanted or min(SEQ_LEN, next((n for n in found if isinstance(n, int)), SEQ_LEN))


def demo_text(split: str) -> Path:
    """The ASCII text file of `split`: plays the demo checkpoint trained on (`train`) or one it never saw (`heldout`).

    In `train`, a line ``<|endoftext|>`` stands between two plays; the demo tokenizer reads it as one id. Raises
    `UsageError` for any other split.
    """
    return Path(str(files(__name__) / "text" / find("text split", split, TEXTS)))
