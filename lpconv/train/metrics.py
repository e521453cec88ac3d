"""What a run writes down: a row per step, kept as JSON lines that a resumed run continues."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpconv.checkpoint.contents import read_json
from lpconv.results import RunRecord, Series, from_json, json_line

__all__ = ["Metrics", "median_step_time", "read_finished", "write_finished"]

_FINISHED = "run.json"


class Metrics:
    """The rows of one run, one per step, in `path` and in memory.

    Begins with the rows up to `step` of an earlier part of the run, so that a resumed run continues them. Without a
    path, as on all processes but the first, nothing is written.
    """

    def __init__(self, path: Path | None, *, step: int = 0) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._open_row: dict[str, Any] | None = None
        if path is not None:
            if step and path.exists():
                lines = (
                    json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")
                )
                self.rows = [row for row in lines if row["step"] <= step]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(map(json_line, self.rows)), encoding="utf-8")

    def begin(self, row: Mapping[str, Any]) -> None:
        """A step is done. Its row is written when the next begins, because an evaluation may still join it."""
        self.flush()
        self._open_row = dict(row)

    def add(self, figures: Mapping[str, Any]) -> None:
        """Figures of the step that was last begun."""
        if self._open_row is not None:
            self._open_row |= figures

    def flush(self) -> None:
        """Write the open row, if there is one."""
        if self._open_row is None:
            return
        self.rows.append(self._open_row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json_line(self._open_row))
        self._open_row = None

    def series(self, name: str) -> Series:
        """A figure over the rows that have it."""
        found = [(row["step"], float(row[name])) for row in self.rows if row.get(name) is not None]
        return Series(name=name, steps=tuple(s for s, _ in found), values=tuple(v for _, v in found))


def median_step_time(rows: list[dict[str, Any]]) -> float | None:
    """Of the steps that recorded and measured nothing; the first of a run warms up and is left out."""
    times = [row["time_s"] for row in rows[1:] if not {"tracked", "memory"} & row.keys()]
    return statistics.median(times) if times else None


def write_finished(folder: Path, record: RunRecord) -> None:
    """Note that the run in `folder` is done, and what it found."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FINISHED).write_text(json_line(record), encoding="utf-8")


def read_finished(folder: Path) -> RunRecord | None:
    """What the run in `folder` found; None where it is not done."""
    path = folder / _FINISHED
    return from_json(RunRecord, read_json(path)) if path.exists() else None
