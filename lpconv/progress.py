"""How long work says how far it is. The command line draws bars from it; the library is silent by default."""

from typing import Protocol


class Progress(Protocol):
    """Receives phases of a run. Calls come from one thread."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        """A phase begins, or goes on after `done`; `total` is 0 where its length is unknown. `unit`: bytes or steps."""

    def advance(self, amount: int, figures: str = "") -> None:
        """That much more of the phase is done; `figures` is what was last measured, in words."""

    def message(self, text: str) -> None:
        """One line worth telling a person."""


class Silent:
    """Tells nobody."""

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None: ...

    def advance(self, amount: int, figures: str = "") -> None: ...

    def message(self, text: str) -> None: ...
