"""Printing to a terminal or a pipe.

Import this module lazily: it loads rich.
"""

import os
import sys
from typing import TextIO

from rich.console import Console, RenderableType

__all__ = ["show"]

_PIPE_WIDTH = 120
# Where the output's encoding has no room for them.
_ASCII = str.maketrans({"→": "->", "…": "~", "–": "-", "─": "-", "━": "-"})


def show(renderable: RenderableType, *, file: TextIO | None = None) -> None:
    """Print to `file` (stdout): styled for a terminal, plain text for anything else, ASCII where the encoding needs it.

    A pipe has no width, so it gets 120 columns unless ``COLUMNS`` says otherwise. rich honours ``NO_COLOR``.
    """
    out = file or sys.stdout
    console = Console(file=out, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        width = console.width if "COLUMNS" in os.environ else _PIPE_WIDTH
        console = Console(file=out, highlight=False, width=width, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
    if "utf" not in (getattr(out, "encoding", None) or "utf-8").lower():
        text = text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
    out.write(text)
