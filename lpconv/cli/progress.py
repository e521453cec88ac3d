"""Progress on stderr: bars on a terminal, and lines with `-v`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lpconv.progress import Progress, Silent
from lpconv.report.numbers import plural, size_text

if TYPE_CHECKING:
    import rich.progress

# Whether `lpconv -v` was given: print a line for each phase of a run, and tracebacks with errors.
VERBOSE: ContextVar[bool] = ContextVar("verbose", default=False)


class _Bars:
    """One bar for the current phase: bytes and speed, or steps, metrics and memory; and the remaining time.

    `stop` restores the terminal.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stderr)  # also while a library's messages are dropped
        self._bar: rich.progress.Progress | None = None

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        from rich import progress as bars

        self.stop()
        columns: dict[str, tuple[rich.progress.ProgressColumn, ...]] = {
            "bytes": (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()),
            "steps": (
                bars.BarColumn(),
                bars.MofNCompleteColumn(),
                bars.TextColumn("{task.fields[figures]}"),
                bars.TimeRemainingColumn(),
            ),
            "": (bars.SpinnerColumn(), bars.TimeElapsedColumn()),  # phases of unknown length
        }
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            *columns[unit if total else ""],
            console=self._console,
            transient=True,
        )
        self._bar.add_task(phase, total=total or None, completed=done, figures="")
        self._bar.start()

    def advance(self, amount: int, figures: str = "") -> None:
        if self._bar is not None:
            shown = f"{figures}, {size_text(_memory_bytes())}" if figures else ""
            self._bar.update(self._bar.task_ids[0], advance=amount, figures=shown)

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _memory_bytes() -> int:
    import psutil
    import torch  # imported already by the run that reports these figures

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


class _Messages(Silent):
    """Lines on stderr instead of bars, for logs and pipes. Only phases with steps, which are long, print a line."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        if unit == "steps":
            self.message(f"{phase}: {plural(total, 'step')}" + (f", resuming after {done}" if done else ""))

    def message(self, text: str) -> None:
        print(text, file=sys.stderr)


class _Log(_Messages):
    """A line for every phase, each with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        if unit == "steps":
            super().start(phase, total, unit=unit, done=done)
        else:
            self.message(phase + (f", {size_text(total)}" if total else ""))

    def message(self, text: str) -> None:
        super().message(f"{time.monotonic() - self._started:8.1f} s  {text}")


@contextmanager
def progress_for(*, quiet: bool) -> Iterator[Progress]:
    """The progress display for this stderr: bars on a terminal, lines otherwise or with -v, nothing with --quiet."""
    if quiet or VERBOSE.get() or not sys.stderr.isatty():
        yield Silent() if quiet else _Log() if VERBOSE.get() else _Messages()
        return
    bars = _Bars()
    try:
        yield bars
    finally:
        bars.stop()
