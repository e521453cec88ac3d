"""Progress bars on stderr, only where a person watches."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lpconv.cli.verbosity import VERBOSE
from lpconv.progress import Silent
from lpconv.report.numbers import size_text

if TYPE_CHECKING:
    import rich.progress

__all__ = ["Bars", "progress_for"]


class Bars:
    """One bar per phase with bytes, speed and time left. A context manager, so that the terminal is left in order."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bars: rich.progress.Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: rich.progress.TaskID | None = None

    def start(self, phase: str, total_bytes: int) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(phase, total=total_bytes or None)

    def advance(self, num_bytes: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, num_bytes)

    def message(self, text: str) -> None:
        self._bars.console.print(text, highlight=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()


class _Messages(Silent):
    """No bars: lines on stderr. For logs and pipes."""

    def message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None: ...


class _Log(_Messages):
    """A line for each phase too, all with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def start(self, phase: str, total_bytes: int) -> None:
        self.message(phase + (f", {size_text(total_bytes)}" if total_bytes else ""))

    def message(self, text: str) -> None:
        super().message(f"{time.monotonic() - self._started:8.1f} s  {text}")


class _Quiet(_Messages):
    """Nothing at all."""

    def message(self, text: str) -> None: ...


def progress_for(*, quiet: bool) -> Bars | _Messages:
    """What suits this stderr: bars on a terminal, lines elsewhere and with -v, nothing with --quiet."""
    if quiet:
        return _Quiet()
    if VERBOSE.get():
        return _Log()
    return Bars() if sys.stderr.isatty() else _Messages()
