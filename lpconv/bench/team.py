"""The processes that hold one case: usually one; of several, which take every step together, the slowest counts."""

import dataclasses
import selectors
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lpconv.bench.cases import Case
from lpconv.bench.child import Child
from lpconv.errors import LpconvError

__all__ = ["Team"]


class Team:
    """Children that get every command at once and give one answer. A context manager: leaving it ends them.

    What one of them fails at, all fail at: the others may be waiting for it for ever, so they are ended.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = tuple(children)
        self._folder = tempfile.TemporaryDirectory(prefix="lpconv-bench-")
        self._merge: Callable[[list[Any]], Any] = _first
        self._failure: LpconvError | None = None

    @property
    def pids(self) -> set[int]:
        """The processes' ids."""
        return {child.pid for child in self._children}

    def prepare(self, case: Case, memory_share: float) -> None:
        """Begin to build a case; `receive` gives its description. Processes on one CPU share the memory too."""
        share = memory_share / (len(self._children) if case.device == "cpu" else 1)
        meeting = str(Path(self._folder.name) / "meeting")
        self._merge = _first
        for rank, child in enumerate(self._children):
            child.send("prepare", case=dataclasses.asdict(case), memory_share=share, rank=rank, meeting=meeting)

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer of all; raises the first error."""
        for child in self._children:
            child.send(do, **arguments)
        self._merge = _MERGES.get(do, _first)
        return self.receive()

    def receive(self) -> Any:
        """The answer to what was begun."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._merge(self._answers())
        except LpconvError as e:
            self._failure = e
            self.close()
            raise

    def _answers(self) -> list[Any]:
        """Of every process, in their order, but read as they come."""
        found: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self._children):
                selector.register(child, selectors.EVENT_READ, rank)
            while len(found) < len(self._children):
                for key, _ in selector.select():
                    found[key.data] = self._children[key.data].receive()
                    selector.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self._children))]

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _slowest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """They took the same steps, each of which is done when the last process has done it."""
    return {
        "seconds": [max(step) for step in zip(*(a["seconds"] for a in answers), strict=True)],
        "wall": max(a["wall"] for a in answers),
        "recompiles": max(a["recompiles"] for a in answers),
    }


def _largest(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return max(answers, key=lambda a: a["peak_bytes"])


_MERGES: dict[str, Callable[[list[Any]], Any]] = {"measure": _slowest, "memory": _largest}
