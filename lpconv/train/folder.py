"""The folder of a fine-tuning: its files, its owner, and whether a run may start or resume in it.

OUT/finetune.json          the options; marks the folder as lpconv's
OUT/metrics.jsonl          a row per step of the run (of the first seed), continued by a resumed run; step 0 is the
                           evaluation before training
OUT/runs/NAME/             metrics of the other runs, checkpoints for resuming, and run.json once a run is finished
OUT/runs/merged/           the merged weights of an adapter, and their codes, until all runs are finished
OUT/runs/published/        the trained model, until all runs are finished
OUT/config.json …          the trained model, config.json last; failed runs leave none
OUT/report.{json,html}     written last, so a folder with them is complete

Only complete checkpoints count: Trainer writes a dozen files into `checkpoint-STEP` and takes the folder with the
largest number as complete. Here a list of the files' hashes is written last.
"""

import contextlib
import json
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, LpconvError, OutputExistsError, UnreadError
from lpconv.options import fields_that_may_change
from lpconv.plan.files import write_sums
from lpconv.results import RunRecord, Series, from_json, json_line, ordered_json_text, to_json
from lpconv.storage.contents import read_json
from lpconv.storage.partfile import PART, check_writable, write_small, writing
from lpconv.storage.place import read_small, reading, sha256_of
from lpconv.storage.staging import SUMS, TUNED, check_ours, check_same_run, is_locked, is_unused, locked_error, try_lock
from lpconv.train.options import FinetuneOptions
from lpconv.train.recoverable import is_adapter

MARKER, REPORT, PAGE = TUNED, "report.json", "report.html"
RUNS, PUBLISHED, MERGED = "runs", "published", "merged"
_FINISHED = "run.json"
_CHECKPOINT = "checkpoint-"
_KEPT = 2  # checkpoints: two, since the last one may be diverging


def asked_for(model: str, options: FinetuneOptions) -> dict[str, Any]:
    """The model and the options that a resumed run must have in common with the one before."""
    free = fields_that_may_change(FinetuneOptions)
    asked = {name: value for name, value in to_json(options).items() if name not in free}
    return {"model": model, "merges": options.source is not None and is_adapter(options.source), **asked}


def check_folder(output: Path, asked: Mapping[str, Any], *, resume: bool, force: bool) -> None:
    """Raise OutputExistsError if the folder exists and may not be used.

    `force` replaces a folder of lpconv, `resume` continues one with the same options, unless another run is using it.
    Raises ResourceError if it cannot be written.
    """
    check_writable(output)
    if is_locked(output):
        raise locked_error(output)
    if is_unused(output) or (output.is_dir() and os.listdir(output) == [MARKER + PART]):  # killed at its start
        return
    if not (output / MARKER).is_file():
        raise OutputExistsError(
            f"`{output}` exists and was not written by `lpconv finetune`", hint="choose another --output"
        )
    if resume:
        check_same_run(output, asked, read_json(output / MARKER))
    elif not force:
        raise OutputExistsError(f"`{output}` exists", hint="continue it with --resume, or start over with --force")
    else:
        check_ours(output, {MARKER, "metrics.jsonl", f"{RUNS}/"})


@contextlib.contextmanager
def held_folder(output: Path, asked: Mapping[str, Any], *, resume: bool, force: bool) -> Iterator[None]:
    """Create or resume the folder, and lock it for the duration of the block. Raises as `check_folder` does."""
    check_folder(output, asked, resume=resume, force=force)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        folder = os.open(output, os.O_RDONLY)
    try:
        if not try_lock(folder):
            raise locked_error(output)
        if force and not resume:
            _clear(output)
        write_small(output / MARKER, ordered_json_text(asked))
        try:
            yield
        finally:
            _remove_unused(output)
    finally:
        os.close(folder)


def _remove_unused(output: Path) -> None:
    """Delete the folder of a run that ended before its first step, whose error matters more than one of the disk."""
    with contextlib.suppress(OSError):
        if os.listdir(output) == [MARKER]:
            (output / MARKER).unlink()
            output.rmdir()


def _clear(output: Path) -> None:
    """Empty the folder but keep it, since the lock is on it. The marker is kept until it is rewritten."""
    with writing(output):
        for path in (p for p in output.iterdir() if p.name != MARKER):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def run_folder(output: Path, role: str, seed: int) -> Path:
    return output / RUNS / f"{role}-seed{seed}"


def remove_leftovers(output: Path) -> None:
    """Delete checkpoints and the models of later seeds, once everything is finished."""
    with writing(output / RUNS):
        for path in (p for x in ("*/checkpoint-*", f"*/{PUBLISHED}", MERGED) for p in (output / RUNS).glob(x)):
            shutil.rmtree(path)


class Metrics:
    """The rows of one run, one per step, in `path` and in memory.

    Starts with the rows up to `step` of an earlier part of the run, so that a resumed run continues them. Without a
    path, as on all processes but the first, nothing is written.
    """

    def __init__(self, path: Path | None, *, step: int = 0) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._open_row: dict[str, Any] | None = None
        if path is not None:
            if step:
                self.rows = [row for row in _read_rows(path) if row["step"] <= step]
                if [row["step"] for row in self.rows if row["step"]] != list(range(1, step + 1)):
                    raise InputError(f"`{path}` lacks the steps before {step}", hint="start over with --force")
            write_small(path, "".join(map(json_line, self.rows)))  # immediately, so that earlier rows cannot be lost

    def begin(self, row: Mapping[str, Any]) -> None:
        """Begin the row of a finished step. It is written when the next begins: an evaluation may add to it."""
        self.flush()
        self._open_row = dict(row)

    def add(self, figures: Mapping[str, Any]) -> None:
        if self._open_row is not None:
            self._open_row |= figures

    def flush(self) -> None:
        if self._open_row is None:
            return
        self.rows.append(self._open_row)
        if self.path is not None:
            with writing(self.path), self.path.open("a", encoding="utf-8") as f:
                f.write(json_line(self._open_row))
        self._open_row = None

    def series(self, name: str) -> Series:
        """A metric over the rows that have it."""
        points = [(row["step"], float(row[name])) for row in self.rows if row.get(name) is not None]
        return Series(name=name, steps=tuple(s for s, _ in points), values=tuple(v for _, v in points))


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a file. A truncated line belongs to a step that will be repeated."""
    with reading(path):
        lines = path.read_bytes().decode("utf-8", "replace").splitlines() if path.exists() else []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            if row["step"]:  # the row of step 0 has only an evaluation
                float(row["loss"]), float(row["time_s"])
            rows += [row] if isinstance(row["step"], int) else []
    return rows


def median_step_time(rows: list[dict[str, Any]]) -> float | None:
    """Median time of steps without measuring, excluding the first step of a run (warm-up)."""
    steps = [row for row in rows if "time_s" in row]
    times = [row["time_s"] for row in steps[1:] if "memory" not in row]
    return statistics.median(times) if times else None


def write_finished(folder: Path, record: RunRecord) -> None:
    write_small(folder / _FINISHED, json_line(record))


def read_finished(folder: Path) -> RunRecord | None:
    """The record of the run in `folder`; None if it is not finished."""
    path = folder / _FINISHED
    return from_json(RunRecord, read_json(path)) if path.exists() else None


def seal_checkpoint(folder: Path, step: int) -> None:
    """Mark the checkpoint of a step as complete, and delete all but the last two."""
    checkpoint = folder / f"{_CHECKPOINT}{step}"
    write_sums(checkpoint, ())
    with writing(folder):
        for old in _checkpoints(folder)[_KEPT:]:
            shutil.rmtree(old)


def last_checkpoint(folder: Path) -> Path | None:
    return next((c for c in _checkpoints(folder) if _is_whole(c)), None)


def drop_broken(folder: Path) -> None:
    """Delete incomplete checkpoints, whose folders later ones will use."""
    with writing(folder):
        for checkpoint in _checkpoints(folder):
            if not _is_whole(checkpoint):
                shutil.rmtree(checkpoint)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_CHECKPOINT))


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, latest first."""
    folders = (p for p in folder.glob(f"{_CHECKPOINT}*") if p.is_dir() and p.name.removeprefix(_CHECKPOINT).isdecimal())
    return sorted(folders, key=step_of, reverse=True)


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file is unchanged. Raises UnreadError if the disk fails."""
    try:
        lines = read_small(checkpoint / SUMS).decode().splitlines()
        sums = [line.partition("  ")[::2] for line in lines]
        return bool(sums) and all(sha256_of(checkpoint / name) == digest for digest, name in sums)
    except UnreadError:  # unknown, so nothing may be deleted
        raise
    except (ValueError, LpconvError):
        return False
