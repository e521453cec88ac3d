"""Where the time of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall seconds by what they were spent on; `seconds` keeps the order in which each was first met."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Count what the block takes, whether or not it fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started)
