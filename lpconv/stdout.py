"""Stdout kept for this program's own lines: libraries in other languages write there too."""

import os
import sys
from typing import TextIO


def own_stdout() -> TextIO:
    """Where stdout leads; what libraries in other languages write there, past Python, goes to stderr from now on.

    The tokenizers library, for one, reports an odd field of tokenizer.json in the middle of a JSON document. Where the
    shell closed one of the two (``>&-``), what is written to it is lost.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    sys.stdout.flush()
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
