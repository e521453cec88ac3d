"""How long work says where it is. The command line draws bars from it; the library is silent by default."""

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Receives phases of a run. Calls come from one thread."""

    def start(self, phase: str, total_bytes: int) -> None:
        """A phase begins; `total_bytes` is 0 where its length is unknown."""

    def advance(self, num_bytes: int) -> None:
        """That much more of the phase is done."""

    def message(self, text: str) -> None:
        """One line worth telling a person."""


class Silent:
    """Tells nobody."""

    def start(self, phase: str, total_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def message(self, text: str) -> None: ...
