"""How far a training run is, on stderr: a bar with loss, time left and memory on a terminal, lines elsewhere."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil

from lpconv.report.numbers import size_text

if TYPE_CHECKING:
    import rich.progress

__all__ = ["TrainingBars", "TrainingLines", "training_progress"]


class TrainingBars:
    """One bar, for the run at hand. A context manager, so that the terminal is left in order."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._process = psutil.Process()
        self._bars: rich.progress.Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: rich.progress.TaskID | None = None

    def begin(self, words: str, steps: int, done: int) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(words, total=steps, completed=done, figures="")

    def step(self, step: int, loss: float) -> None:
        if self._task is not None:
            figures = f"loss {loss:.4f}, {size_text(self._memory_bytes())}"
            self._bars.update(self._task, completed=step, figures=figures)

    def message(self, text: str) -> None:
        self._bars.console.print(text, highlight=False)

    def _memory_bytes(self) -> int:
        import torch  # there is a run, so it is imported already

        return torch.cuda.memory_allocated() if torch.cuda.is_available() else self._process.memory_info().rss

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()


class TrainingLines:
    """A line as each run begins. For logs and pipes; nothing where `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def begin(self, words: str, steps: int, done: int) -> None:
        self.message(f"{words}: {steps} steps" + (f", going on after {done}" if done else ""))

    def step(self, step: int, loss: float) -> None: ...

    def message(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None: ...


def training_progress(*, quiet: bool) -> TrainingBars | TrainingLines:
    """What suits this stderr."""
    return TrainingBars() if sys.stderr.isatty() and not quiet else TrainingLines(quiet=quiet)
