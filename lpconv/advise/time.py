"""How long an advice may still take."""

import time


class Deadline:
    """Counts down from `seconds`. A part of it may be given away, as a deadline of its own."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, below zero where it is over."""
        return self._end_s - time.perf_counter()

    def part(self, share: float) -> "Deadline":
        """A deadline after that share of what is left."""
        return Deadline(max(self.left_s, 0.0) * share)
