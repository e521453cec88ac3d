"""Reserve stdout for lpconv's own output, because libraries in other languages write to it as well."""

import os
import sys
from typing import TextIO


def own_stdout() -> TextIO:
    """A text stream to the current stdout; from now on, direct writes to file descriptor 1 go to stderr.

    The tokenizers library, for example, reports an unexpected field of tokenizer.json on stdout, in the middle of a
    JSON document. If the shell closed stdout or stderr (``>&-``), writes to it are discarded.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    sys.stdout.flush()
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(descriptor, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
