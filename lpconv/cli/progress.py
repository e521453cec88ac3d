"""Progress on stderr: bars on a terminal; elsewhere a line from time to time, and for every phase with `-v`."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lpconv.progress import Progress, Silent
from lpconv.report.numbers import count_text, duration_text, plural, size_text

if TYPE_CHECKING:
    import rich.progress

# Whether `lpconv -v` was given: print a line for each phase of a run, and tracebacks with errors.
VERBOSE: ContextVar[bool] = ContextVar("verbose", default=False)
# Whether the command was given -q: print the headline of a result, and nothing about progress.
QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
_LINE_EVERY_S = 30.0
_LONG = ("steps", "layers", "answers")  # units of phases that take long
_WIDE = 120  # columns of a terminal with room for long bars and memory


class _Bars:
    """One bar for the current phase: bytes and speed, or a count, metrics and memory; and the remaining time.

    A spinner shows that work goes on before the first phase, in phases of unknown length, and once a bar is full.
    `stop` restores the terminal.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stderr)  # also while a library's messages are dropped
        self._bar: rich.progress.Progress | None = None
        self.start("starting", 0)

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        from rich import progress as bars
        from rich.table import Column

        self.stop()
        columns: tuple[rich.progress.ProgressColumn, ...]
        if not total:
            columns = bars.SpinnerColumn(), bars.TimeElapsedColumn()
        elif unit == "bytes":
            columns = self._length(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()
        else:
            count = bars.MofNCompleteColumn(), bars.TextColumn("" if unit == "steps" else unit)
            figures = bars.TextColumn("{task.fields[figures]}", table_column=Column())  # wraps, so others are not cut
            columns = bars.SpinnerColumn(), self._length(), *count, figures, bars.TimeRemainingColumn()
        name = bars.TextColumn("{task.description}", markup=False)
        period_s = 30 if unit == "bytes" else 3600  # over which speed is averaged: one step may take minutes
        self._bar = bars.Progress(name, *columns, console=self._console, transient=True, speed_estimate_period=period_s)
        self._bar.add_task(phase, total=total or None, completed=done, figures="")
        self._bar.start()

    def advance(self, amount: int, figures: str = "") -> None:
        if self._bar is None:
            return
        task = self._bar.tasks[0]
        has_room = self._console.width >= _WIDE
        shown = f"{figures}, {size_text(_memory_bytes())} of memory" if figures and has_room else figures
        self._bar.update(task.id, advance=amount, figures=shown)
        if task.finished:
            self._bar.refresh()
            self.start(f"finishing: {task.description}", 0)

    def _length(self) -> "rich.progress.BarColumn":
        from rich.progress import BarColumn

        return BarColumn(40 if self._console.width >= _WIDE else 10)

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _memory_bytes() -> int:
    import psutil
    import torch  # imported already by the run that reports these figures

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


class _Lines:
    """Lines on stderr instead of bars, for logs and pipes.

    Long phases print a line at once; with -v all phases do, and lines begin with the seconds
    since the start. Every 30 s another line says how far the current phase is.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._begin("starting", 0, "bytes", 0)
        self._stopped = threading.Event()
        threading.Thread(target=self._print_regularly, args=(sys.stderr,), daemon=True).start()

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        self._begin(phase, total, unit, done)
        if total and unit in _LONG:
            self.message(
                f"{phase}: {plural(total, unit.removesuffix('s'))}" + (f", resuming after {done}" if done else "")
            )
        elif VERBOSE.get():
            self.message(phase + (f", {self._amount(total)}" if total else ""))

    def advance(self, amount: int, figures: str = "") -> None:
        self._done += amount
        self._figures, self._advanced_s = figures, time.monotonic()

    def message(self, text: str) -> None:
        since_start = f"{time.monotonic() - self._started_s:8.1f} s  " if VERBOSE.get() else ""
        print(since_start + text, file=sys.stderr)

    def stop(self) -> None:
        self._stopped.set()

    def _begin(self, phase: str, total: int, unit: str, done: int) -> None:
        self._phase, self._total, self._unit, self._done, self._figures = phase, total, unit, done, ""
        self._first, self._phase_s = done, time.monotonic()
        self._advanced_s = self._phase_s

    def _print_regularly(self, stderr: object) -> None:
        while not self._stopped.wait(_LINE_EVERY_S):
            if sys.stderr is stderr:  # tests replace it
                self.message(self._state())

    def _state(self) -> str:
        """The phase, n of total, the latest figures, and the time left, or the time spent if the total is unknown."""
        done, total = self._done - self._first, self._total
        if not total:
            return f"{self._phase}: {duration_text(time.monotonic() - self._phase_s)} so far"
        if self._done >= total:
            return f"finishing: {self._phase}"
        so_far = size_text(self._done) if self._unit == "bytes" else count_text(self._done)
        of_total = f"{so_far} of {self._amount(total)}"
        left = ""
        if done > 0:
            each_s = (self._advanced_s - self._phase_s) / done
            begun_s = min(time.monotonic() - self._advanced_s, each_s)  # in the one that is not finished
            left = f"about {duration_text(each_s * (total - self._done) - begun_s)} left"
        return f"{self._phase}: {', '.join(filter(None, (of_total, self._figures, left)))}"

    def _amount(self, count: int) -> str:
        return size_text(count) if self._unit == "bytes" else f"{count_text(count)} {self._unit}"


@contextmanager
def progress_for(*, shown: bool = True) -> Iterator[Progress]:
    """The progress display for this stderr: bars on a terminal, lines otherwise or with -v, nothing with --quiet."""
    if QUIET.get() or not shown:
        yield Silent()
        return
    display = _Bars() if sys.stderr.isatty() and not VERBOSE.get() else _Lines()
    try:
        yield display
    finally:
        display.stop()
