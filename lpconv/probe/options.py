"""What a probe is asked for. Plain Python; nothing here reads a file."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProbeOptions"]


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """How to probe. `data` is a text file, by default the text that ships with lpconv.

    `seq_len` is in tokens, by default 128 or the model's longest where that is less. Every `every`-th step is recorded.
    """

    data: Path | None = None
    steps: int = 4
    batch_size: int = 8
    seq_len: int | None = None
    every: int = 1
    seed: int = 0
    revision: str | None = None
