"""What a command says on stderr while it runs: progress bars only where a person watches, and lines with `-v`."""

import sys
import time
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lpconv.progress import Silent
from lpconv.report.numbers import size_text

if TYPE_CHECKING:
    import rich.progress

# Whether `lpconv -v` was given: a line for each phase of a run, and with errors where they came from.
VERBOSE: ContextVar[bool] = ContextVar("verbose", default=False)


class Bars:
    """One bar, for the phase at hand: its bytes and speed, or its steps, figures and memory; and the time left.

    A context manager, so that the terminal is left in order.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
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
            "": (bars.SpinnerColumn(), bars.TimeElapsedColumn()),  # nobody knows how long it takes
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
    import torch  # a run tells its figures, so it is imported already

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


class _Messages(Silent):
    """No bars: lines on stderr, for logs and pipes. A phase of steps is long, so that its start is worth a line."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        if unit == "steps":
            self.message(f"{phase}: {total} steps" + (f", going on after {done}" if done else ""))

    def message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None: ...


class _Log(_Messages):
    """A line for each phase too, all with the seconds since the start."""

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
    """Nothing at all."""

    def message(self, text: str) -> None: ...


def progress_for(*, quiet: bool) -> Bars | _Messages:
    """What suits this stderr: bars on a terminal, lines elsewhere and with -v, nothing with --quiet."""
    if quiet:
        return _Quiet()
    if VERBOSE.get():
        return _Log()
    return Bars() if sys.stderr.isatty() else _Messages()
