"""A bench without child processes: their work is done here when the answer is read."""

import math
import os
import pickle
from typing import Any

import pytest

from lpconv.bench.team import Child
from lpconv.bench.worker import Worker, answer
from lpconv.errors import LpconvError

__all__ = ["Direct", "without_processes"]


class Direct(Child):
    """Answers like a child process, through pickle."""

    def __init__(self) -> None:
        self._worker, self._asked = Worker(), b""
        self._readable, self._writable = os.pipe()

    @property
    def pid(self) -> int:
        return os.getpid()

    def fileno(self) -> int:
        return self._readable

    def send(self, do: str, **arguments: Any) -> None:
        self._asked = pickle.dumps((do, arguments))
        os.write(self._writable, b".")

    def receive(self) -> Any:
        os.read(self._readable, 1)
        found = pickle.loads(pickle.dumps(answer(self._worker, *pickle.loads(self._asked))))
        if isinstance(found, LpconvError):
            raise found
        return found

    def close(self) -> None:
        for end in (self._readable, self._writable):
            if end >= 0:
                os.close(end)
        self._readable = self._writable = -1


def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benches run in this process, and measure the peaks on small matrices."""
    monkeypatch.setattr("lpconv.bench.run.Child", Direct)
    monkeypatch.setattr("lpconv.bench.rows.Child", Direct)
    monkeypatch.setattr("lpconv.bench.worker._CPU_SIZE", 128)
    monkeypatch.setattr("lpconv.bench.rows._BUSY", math.inf)  # tests share their machine
