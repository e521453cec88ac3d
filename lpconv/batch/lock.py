"""The lock file of a batch: resolved revisions, settings of each job, and hashes of the files that conversions wrote.

It is stored next to the manifest and belongs in version control. Resuming uses it to find outputs that are up to date.
A `--locked` run uses exactly its revisions and fails if a conversion writes different files. Measurements differ from
run to run, so for those the lock pins the inputs and settings but not the results.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpconv.batch.kinds import DEFAULT_KIND, KINDS, BatchJob
from lpconv.batch.manifest import Manifest
from lpconv.errors import InputError, VerificationError
from lpconv.options import fields_of_run
from lpconv.results import FileRecord, JobOutcome, from_json, ordered_json_text, to_json
from lpconv.results.documents import Result
from lpconv.storage.partfile import write_small, writing
from lpconv.storage.place import open_regular, read_small, sha256_of
from lpconv.storage.staging import wait_for_lock

# Settings that change neither the output nor its verdict.
_PERMISSIONS = {"trust_remote_code"}  # every user has to grant these again


@dataclass(frozen=True, kw_only=True)
class LockEntry:
    """The lock entry of a finished job.

    A local `resolved` is a path relative to the manifest's folder, so that the lock can be shared. `files` are the
    weight files written, and `checksums_sha256` is the hash of the output's SHA256SUMS; jobs that measure have neither.
    `versions` help to explain a difference; a different version alone is no difference.
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
class Lock(Result):
    """The entries of a lock file, in the manifest's order of jobs."""

    kind: str = "batch-lock"
    entries: tuple[LockEntry, ...] = ()

    def get(self, job_id: str) -> LockEntry | None:
        """The entry of a job, or None."""
        return next((e for e in self.entries if e.id == job_id), None)

    def with_entry(self, entry: LockEntry, jobs: tuple[BatchJob, ...]) -> "Lock":
        """A copy with one entry added or replaced, sorted as `jobs`, and without entries of other jobs."""
        by_id = {e.id: e for e in self.entries} | {entry.id: entry}
        return replace(self, entries=tuple(by_id[job.id] for job in jobs if job.id in by_id))


def read_lock(path: Path) -> Lock | None:
    """Read the lock file at `path`; None if it does not exist. Raises InputError if it is not a lock file."""
    try:
        text = read_small(path) if path.exists() else b""  # an empty file has been created but not written yet
        return from_json(Lock, json.loads(text)) if text else None
    except (ValueError, RecursionError) as e:
        raise InputError(
            f"cannot read lock file `{path}`: {e}", hint="restore the file, or delete it and run again"
        ) from e


def update_lock(path: Path, change: Callable[[Lock], Lock] = lambda lock: lock) -> Lock:
    """Change the lock file, or create it. Returns the new contents, including entries of other processes.

    Raises ResourceError if it cannot be written.
    """
    with _lock_for_writing(path):
        lock = change(read_lock(path) or Lock())
        write_small(path, ordered_json_text(to_json(lock)))
    return lock


@contextlib.contextmanager
def _lock_for_writing(path: Path) -> Iterator[None]:
    """Exclusive lock on the file for the duration of the block. Readers see the old or the new contents."""
    while True:
        with writing(path):
            # Opened for writing because some file systems lock only writers.
            f = os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b")
        with f:
            wait_for_lock(f.fileno())
            if path.exists() and os.path.samestat(os.fstat(f.fileno()), path.stat()):  # not replaced meanwhile
                yield
                return


def lock_entry(job: BatchJob, outcome: JobOutcome, folder: Path) -> LockEntry:
    """The lock entry of a job that has just finished; `folder` is the manifest's folder."""
    kind = KINDS[job.kind]
    source = outcome.source
    return LockEntry(
        id=job.id,
        kind=job.kind,
        model=_portable_path(job.model, folder),
        resolved=_portable_path(source.resolved if source else job.model, folder),
        revision=source.revision if source else None,
        settings=_locked_settings(job, folder),
        source_files=source.files if source else (),
        files=outcome.files,
        checksums_sha256=sha256_of(job.output / kind.proof) if kind.is_exact else None,
        versions=dict(sorted(outcome.versions.items())),  # records read back have another order
    )


def _locked_settings(job: BatchJob, folder: Path) -> dict[str, Any]:
    """The options that determine a job's output or verdict, as JSON."""
    settings = _lockable_settings(to_json(job.options), job)
    for declared in KINDS[job.kind].fields.values():
        if declared.option.is_path and settings[declared.field] is not None:
            settings[declared.field] = _portable_path(str(settings[declared.field]), folder)
    return settings


def _lockable_settings(settings: Mapping[str, Any], job: BatchJob) -> dict[str, Any]:
    left_out = fields_of_run(type(job.options)) | _PERMISSIONS
    return {k: v for k, v in settings.items() if k not in left_out}


def _portable_path(name: str, folder: Path) -> str:
    """A model's name, or an absolute path as a path relative to `folder`, which then starts with a dot."""
    if not Path(name).is_absolute():
        return name
    path = Path(os.path.relpath(name, folder)).as_posix()
    return path if path.startswith(".") else f"./{path}"


def stale_reasons(job: BatchJob, entry: LockEntry, folder: Path) -> list[str]:
    """Reasons why the finished output of `job` is outdated; empty if it is up to date."""
    proof = job.output / KINDS[job.kind].proof
    if entry.checksums_sha256 is not None and (not proof.is_file() or sha256_of(proof) != entry.checksums_sha256):
        return [f"its {proof.name} differs from the one in the lock file"]
    changed = [f"{f.name} was changed" for f in entry.files if not _has_size(job.output / f.name, f)]
    sources = _source_differences(entry, folder, since=proof.stat().st_mtime)
    return [*changed, *_job_differences(job, entry, folder), *sources]


def check_lockable(manifest: Manifest, jobs: tuple[BatchJob, ...], lock: Lock | None) -> None:
    """Raise an error, before any work, if manifest or local sources differ from the lock.

    Raises VerificationError that lists every difference, or InputError if there is no lock.
    """
    if lock is None:
        hint = "run the batch once without --locked, and keep the lock file that it writes"
        raise InputError(f"lock file `{manifest.lock_path}` does not exist", hint=hint)
    differences: list[str] = []
    for job in jobs:
        entry = lock.get(job.id)
        if entry is None:
            differences.append(f"{job.id}: not in the lock file")
            continue
        differences += [f"{job.id}: {d}" for d in _job_differences(job, entry, manifest.folder)]
        differences += [f"{job.id}: {d}" for d in _source_differences(entry, manifest.folder, since=None)]
    if differences:
        raise VerificationError(
            "the batch differs from its lock file: " + "; ".join(differences),
            hint="run without --locked to write a new lock",
            details={"differences": differences},
        )


def check_locked(job: BatchJob, entry: LockEntry, outcome: JobOutcome) -> None:
    """Raise VerificationError if the files of the output differ from the lock; the output is then moved aside.

    Measurements have no files in the lock and always pass.
    """
    was, now = ({f.name: f.sha256 for f in files} for files in (entry.files, outcome.files))
    differing = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    if not differing:
        return
    aside = _move_aside(job.output)
    changed = [f"{k} {entry.versions.get(k)} → {v}" for k, v in outcome.versions.items() if entry.versions.get(k) != v]
    raise VerificationError(
        f"{job.id}: files differ from the lock file: {', '.join(differing)}",
        hint=f"the output was kept as `{aside}`; versions: {', '.join(changed) or 'as in the lock file'}",
        details={"differences": differing, "versions": changed},
    )


def _job_differences(job: BatchJob, entry: LockEntry, folder: Path) -> Iterator[str]:
    settings = _locked_settings(job, folder) | {"kind": job.kind, "model": _portable_path(job.model, folder)}
    locked = _lockable_settings(entry.settings, job) | {"kind": entry.kind, "model": entry.model}
    for name in sorted(settings.keys() | locked.keys()):
        if settings.get(name) != locked.get(name):
            yield f"{name} is {_show(settings.get(name))} but was {_show(locked.get(name))}"


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _source_differences(entry: LockEntry, folder: Path, *, since: float | None) -> Iterator[str]:
    """Files of a local source that differ from the lock; with `since`, only files modified after that time."""
    directory = folder / entry.resolved
    if not entry.resolved.startswith(".") or not directory.is_dir():
        return
    for record in entry.source_files:
        if _is_changed(directory / record.name, record, since):
            yield f"source file {record.name} was changed"


def _is_changed(path: Path, record: FileRecord, since: float | None) -> bool:
    """Whether a file has changed: by size, then by time as in `make`, then by hash if one is recorded."""
    if not _has_size(path, record):
        return True
    if since is not None and path.stat().st_mtime < since:
        return False
    if record.sha256 is None:
        return since is not None
    return sha256_of(path) != record.sha256


def _has_size(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.size_bytes


def _move_aside(output: Path) -> Path:
    names = (output.with_name(f"{output.name}.failed{number or ''}") for number in range(1000))
    aside = next(path for path in names if not path.exists())
    return output.rename(aside)
