"""The lock of a batch: what every job resolved to, the settings it ran with, and hashes of what a conversion wrote.

It lies beside the manifest and belongs into version control. Resuming reads it to know which outputs are up to date;
a locked run takes the very revisions in it and fails where a conversion comes out different (see `compare`). What a
measurement finds differs from run to run, so of those the lock pins what is measured, never what was found.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpconv.batch.kinds import KINDS
from lpconv.batch.manifest import DEFAULT_KIND, BatchJob
from lpconv.checkpoint.partfile import sha256_of, write_small
from lpconv.errors import InputError
from lpconv.results import SCHEMA_VERSION, FileRecord, JobOutcome, from_json, ordered_json_text, to_json

__all__ = [
    "Lock",
    "LockEntry",
    "lock_entry",
    "locked_settings",
    "portable",
    "read_lock",
    "write_lock",
]

# Settings that change neither the output nor how it was judged.
_HOW_NOT_WHAT = frozenset({"max_memory", "workers", "resume", "force", "trust_remote_code", "log_to", "command"})


@dataclass(frozen=True, kw_only=True)
class LockEntry:
    """One finished job. A local `resolved` is a path from the manifest's folder, so that the lock can be shared.

    `files` are the weight files written, `checksums_sha256` is the hash of the output's SHA256SUMS; jobs that measure
    have neither. `versions` are recorded to explain a difference; another version alone is none.
    """

    id: str
    kind: str = DEFAULT_KIND
    model: str
    resolved: str
    revision: str | None
    settings: dict[str, Any]
    source_files: tuple[FileRecord, ...]
    files: tuple[FileRecord, ...]
    checksums_sha256: str | None = None
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The entries of a lock file, in the order of the manifest's jobs."""

    schema_version: int = SCHEMA_VERSION
    kind: str = "batch-lock"
    entries: tuple[LockEntry, ...] = ()

    def get(self, job_id: str) -> LockEntry | None:
        """The entry of a job, or None."""
        return next((e for e in self.entries if e.id == job_id), None)

    def with_entry(self, entry: LockEntry, jobs: tuple[BatchJob, ...]) -> "Lock":
        """This lock with one entry added or replaced, in the order of `jobs`, without entries of other jobs."""
        by_id = {e.id: e for e in self.entries} | {entry.id: entry}
        return replace(self, entries=tuple(by_id[job.id] for job in jobs if job.id in by_id))


def read_lock(path: Path) -> Lock | None:
    """The lock file at `path`, None where there is none. InputError for a file that is no lock."""
    try:
        return from_json(Lock, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise InputError(f"cannot read lock file `{path}`: {e}", hint="restore it, or remove it and run again") from e


def write_lock(path: Path, lock: Lock) -> None:
    """Replace the lock file in one step: a reader sees the old lock or the new one. ResourceError where it cannot."""
    write_small(path, ordered_json_text(to_json(lock)))


def lock_entry(job: BatchJob, outcome: JobOutcome, folder: Path) -> LockEntry:
    """The entry of a job that has just been done; `folder` is the manifest's."""
    kind = KINDS[job.kind]
    source = outcome.source
    return LockEntry(
        id=job.id,
        kind=job.kind,
        model=portable(job.model, folder),
        resolved=portable(source.resolved if source else job.model, folder),
        revision=source.revision if source else None,
        settings=locked_settings(job, folder),
        source_files=source.files if source else (),
        files=outcome.files,
        checksums_sha256=sha256_of(job.output / kind.proof) if kind.is_exact else None,
        versions=outcome.versions,
    )


def locked_settings(job: BatchJob, folder: Path) -> dict[str, Any]:
    """Those of a job's options that decide what is done and how it is judged, JSON-able."""
    settings = {k: v for k, v in to_json(job.options).items() if k not in _HOW_NOT_WHAT}
    for declared in KINDS[job.kind].fields.values():
        if declared.option.is_path and settings[declared.field] is not None:
            settings[declared.field] = portable(str(settings[declared.field]), folder)
    return settings


def portable(name: str, folder: Path) -> str:
    """A model's name, or for an absolute path the path from `folder`, which then starts with a dot."""
    if not Path(name).is_absolute():
        return name
    path = Path(os.path.relpath(name, folder)).as_posix()
    return path if path.startswith(".") else f"./{path}"
