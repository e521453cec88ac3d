"""The folder an output grows in, and the one rename that publishes it.

While a run works, everything lies in `OUT.partial` beside OUT, with a journal of the files that are complete. A run
that fails or is killed leaves that folder and nothing called OUT; `--resume` goes on from its journal, if source and
options are still the same. A lock on the journal keeps two runs apart.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lpconv.checkpoint.partfile import fsync_directory, sha256_of, write_error
from lpconv.errors import OutputExistsError
from lpconv.results import FileRecord

__all__ = ["JOURNAL", "MARKER", "Staging", "files_of"]

JOURNAL = "journal.jsonl"
MARKER = "lpconv.json"  # what says that a directory is an output of ours


class Staging:
    """The working folder of one output. Use as a context manager: leaving it releases the lock, whatever happened.

    `identity` is what must be the same for a resume: plan, source files, library versions that shape the bytes.
    """

    def __init__(self, output: Path, identity: dict[str, Any], *, resume: bool, force: bool) -> None:
        self.output = output
        self.directory = output.with_name(output.name + ".partial")
        self.done: list[dict[str, Any]] = []
        _check_output(output, force=force)
        if self.directory.exists() and not resume and not force:
            raise OutputExistsError(
                f"`{self.directory}` is left from an interrupted run",
                hint="--resume continues it, --force starts anew",
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._journal = (self.directory / JOURNAL).open("a+b")
        except OSError as e:
            raise write_error(e, self.directory) from e
        self._lock()
        try:
            self._begin(identity, resume=resume)
        except BaseException:
            self._journal.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._journal.close()
            raise OutputExistsError(
                f"another run is writing `{self.directory}`", hint="wait for it, or choose another --output"
            ) from e

    def _begin(self, identity: dict[str, Any], *, resume: bool) -> None:
        lines = _read_journal(self.directory / JOURNAL)
        if resume and lines:
            changed = sorted(k for k in {*identity, *lines[0]} if identity.get(k) != lines[0].get(k))
            if changed:
                raise OutputExistsError(
                    f"`{self.directory}` was begun with other {', '.join(changed)}",
                    hint="repeat the command of that run with --resume, or start anew with --force",
                    details={"changed": changed},
                )
            self.done = [line for line in lines[1:] if self._is_intact(line)]
            return
        _empty(self.directory, keep=JOURNAL)
        os.ftruncate(self._journal.fileno(), 0)
        self.append(identity)

    def _is_intact(self, line: dict[str, Any]) -> bool:
        for f in line.get("files", ()):
            path = self.directory / f["name"]
            if not path.is_file() or path.stat().st_size != f["size_bytes"] or sha256_of(path) != f["sha256"]:
                return False
        return True

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to the journal, durably."""
        try:
            self._journal.write(json.dumps(line).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        except OSError as e:
            raise write_error(e, self.directory / JOURNAL) from e

    def publish(self) -> None:
        """Make the folder the output, by one rename. A replaced output is deleted only after that."""
        (self.directory / JOURNAL).unlink()
        old = self.output.with_name(self.output.name + ".replaced")
        try:
            if self.output.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(self.output, old)
            os.rename(self.directory, self.output)
            fsync_directory(self.output.parent)
        except OSError as e:
            raise write_error(e, self.output) from e
        shutil.rmtree(old, ignore_errors=True)

    def set_aside(self) -> Path:
        """Keep a failed output for inspection as `OUT.failed`, never as OUT."""
        failed = self.output.with_name(self.output.name + ".failed")
        shutil.rmtree(failed, ignore_errors=True)
        (self.directory / JOURNAL).unlink()
        os.rename(self.directory, failed)
        return failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._journal.close()


def _check_output(output: Path, *, force: bool) -> None:
    if not output.exists() and not output.is_symlink():
        return
    if not force:
        raise OutputExistsError(f"`{output}` exists", hint="choose another --output, or replace it with --force")
    if not output.is_dir() or (any(output.iterdir()) and not (output / MARKER).exists()):
        raise OutputExistsError(
            f"`{output}` is not an output of lpconv, and --force does not delete it", hint="choose another --output"
        )


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """The journal's lines up to the first one that was cut short."""
    lines = []
    for raw in path.read_bytes().splitlines():
        try:
            lines.append(json.loads(raw))
        except ValueError:
            break
    return lines


def _empty(directory: Path, keep: str) -> None:
    for path in directory.iterdir():
        if path.name == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def files_of(line: dict[str, Any]) -> tuple[FileRecord, ...]:
    """The finished files that a journal line names."""
    return tuple(FileRecord(**f) for f in line["files"])
