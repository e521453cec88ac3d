"""Time accounting of a run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall-clock seconds by activity; `seconds` is in order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Add the time of the block to an activity, even if the block fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started)
