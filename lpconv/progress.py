"""Progress reports of long work. The command line draws bars from them; the library is silent by default."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receiver of progress reports. All calls come from one thread."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        """Begin a phase, or continue it after `done`. `total` is 0 if unknown. `unit`: bytes or steps."""

    def advance(self, amount: int, figures: str = "") -> None:
        """Report that `amount` more of the phase is done; `figures` are the latest measurements as text."""

    def message(self, text: str) -> None:
        """Show one line of text to the user."""


class Silent:
    """A Progress that reports nothing."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None: ...

    def advance(self, amount: int, figures: str = "") -> None: ...

    def message(self, text: str) -> None: ...


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and loading reports inside the context, then restore the settings."""
    import transformers

    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
