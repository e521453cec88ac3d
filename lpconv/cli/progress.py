"""Progress on stderr: bars on a terminal, and lines with `-v`."""

import sys
import time
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lpconv.progress import Silent
from lpconv.report.numbers import plural, size_text

if TYPE_CHECKING:
    import rich.progress

# Whether `lpconv -v` was given: print a line for each phase of a run, and tracebacks with errors.
VERBOSE: ContextVar[bool] = ContextVar("verbose", default=False)


class Bars:
    """One bar for the current phase: bytes and speed, or steps, metrics and memory; and the remaining time.

    A context manager, so that the terminal is restored at the end.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stderr)  # also while a library's messages are dropped
        self._bar: rich.progress.Progress | None = None

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        from rich import progress as bars

        self._stop()
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

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None: ...


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


class _Quiet(_Messages):
    """Prints nothing."""

    def message(self, text: str) -> None: ...


def progress_for(*, quiet: bool) -> Bars | _Messages:
    """The progress display for this stderr: bars on a terminal, lines otherwise or with -v, nothing with --quiet."""
    if quiet:
        return _Quiet()
    if VERBOSE.get():
        return _Log()
    return Bars() if sys.stderr.isatty() else _Messages()
