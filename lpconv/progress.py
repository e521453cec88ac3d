"""Progress reports of long work. The command line draws bars from them; the library is silent by default."""

import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Receiver of progress reports. All calls come from one thread."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        """Begin a phase, or continue it after `done`.

        `total` is 0 if unknown. `unit` is bytes, steps, or another plural that is shown after the count.
        """

    def advance(self, amount: int, figures: str = "") -> None:
        """Report that `amount` more of the phase is done; `figures` are the latest measurements as text."""

    def message(self, text: str) -> None:
        """Show one line of text to the user."""


class Silent:
    """A Progress that reports nothing."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None: ...

    def advance(self, amount: int, figures: str = "") -> None: ...

    def message(self, text: str) -> None: ...


def counted(items: Collection[T], phase: str, unit: str, progress: Progress) -> Iterator[T]:
    """The items, as a phase that advances when the next one is asked for."""
    progress.start(phase, len(items), unit=unit)
    for item in items:
        yield item
        progress.advance(1)


class Deadline(Silent):
    """A time limit of `seconds` from now, and a Progress that raises TimeIsUp in the phase that reports after it.

    With `fits`, a phase also ends as soon as it would take longer than the time that is left.
    """

    fits = False

    def __init__(self, seconds: float, progress: Progress) -> None:
        self.progress = progress
        self._start_s = time.perf_counter()
        self._end_s = self._start_s + seconds
        self._total, self._done, self._phase_s = 0, 0, self._start_s

    @property
    def spent_s(self) -> float:
        """Seconds since creation."""
        return time.perf_counter() - self._start_s

    @property
    def left_s(self) -> float:
        """Remaining seconds; negative if the deadline has passed."""
        return self._end_s - time.perf_counter()

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Context manager that raises TimeIsUp in its block at the limit, also in a phase that reports nothing.

        Only the main thread can be interrupted; elsewhere the block only ends when it reports.
        """
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            yield
            return
        before = signal.signal(signal.SIGALRM, _raise_time_is_up)
        started_s = time.monotonic()
        outer_s, _ = signal.setitimer(signal.ITIMER_REAL, max(self.left_s, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if outer_s:  # an enclosing limit
                signal.setitimer(signal.ITIMER_REAL, max(outer_s - (time.monotonic() - started_s), 1e-3))

    def part(self, share: float) -> "Deadline":
        """A deadline after the given share of the remaining time."""
        return Deadline(max(self.left_s, 0.0) * share, self.progress)

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        self.advance(0)
        self._total, self._done, self._phase_s = total - done, 0, time.perf_counter()
        self.progress.start(phase, total, unit=unit, done=done)

    def advance(self, amount: int, figures: str = "") -> None:
        if self.left_s <= 0 or (self.fits and self._phase_left_s(amount) > self.left_s):
            raise TimeIsUp
        self.progress.advance(amount, figures)

    def message(self, text: str) -> None:
        self.progress.message(text)

    def _phase_left_s(self, amount: int) -> float:
        """Seconds that the rest of the phase will take, judged by its first part."""
        self._done += amount
        taken_s = time.perf_counter() - self._phase_s
        return taken_s / self._done * (self._total - self._done) if self._done else 0.0


def _raise_time_is_up(number: int, frame: object) -> None:
    raise TimeIsUp


class TimeIsUp(BaseException):
    """Raised within a phase once its deadline has passed. Like an interrupt, it is not an error of the phase."""


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
