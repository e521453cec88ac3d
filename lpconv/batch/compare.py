"""Jobs and outputs held against the lock: which outputs are up to date, and whether a locked run may go on."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lpconv.batch.kinds import KINDS, JobOptions
from lpconv.batch.lock import Lock, LockEntry, locked_settings, portable
from lpconv.batch.manifest import BatchJob, Manifest
from lpconv.bench.options import BenchOptions
from lpconv.checkpoint.partfile import sha256_of
from lpconv.errors import InputError, VerificationError
from lpconv.results import FileRecord, JobOutcome

__all__ = ["check_lockable", "check_locked_result", "pinned_options", "stale_reasons"]


def stale_reasons(job: BatchJob, entry: LockEntry | None, folder: Path) -> list[str]:
    """Why the finished output of `job` is not what a run would write; empty where it is up to date."""
    if entry is None:
        return ["the lock does not know it"]
    proof = job.output / KINDS[job.kind].proof
    if entry.checksums_sha256 is not None and (not proof.is_file() or sha256_of(proof) != entry.checksums_sha256):
        return [f"its {proof.name} is not the one in the lock"]
    changed = [f"{f.name} was changed" for f in entry.files if _size(job.output / f.name) != f.size_bytes]
    sources = _source_differences(entry, folder, since=proof.stat().st_mtime)
    return [*changed, *_job_differences(job, entry, folder), *sources]


def check_lockable(manifest: Manifest, jobs: tuple[BatchJob, ...], lock: Lock | None) -> None:
    """Refuse a locked run of `jobs`, before any work, where the manifest or local sources differ from the lock.

    Raises VerificationError that names every difference, InputError where there is no lock.
    """
    if lock is None:
        hint = "run the batch once without --locked, and keep the lock it writes"
        raise InputError(f"there is no lock file `{manifest.lock_path}`", hint=hint)
    found: list[str] = []
    for job in jobs:
        entry = lock.get(job.id)
        if entry is None:
            found.append(f"{job.id}: not in the lock")
            continue
        found += [f"{job.id}: {d}" for d in _job_differences(job, entry, manifest.folder)]
        found += [f"{job.id}: {d}" for d in _source_differences(entry, manifest.folder, since=None)]
    if found:
        raise VerificationError(
            "the batch differs from its lock: " + "; ".join(found),
            hint="run without --locked to write a new lock",
            details={"differences": found},
        )


def pinned_options(options: JobOptions, entry: LockEntry) -> JobOptions:
    """The options with the revision of the lock, where the source has one."""
    if isinstance(options, BenchOptions):  # which takes a model as it is cached
        return options
    return replace(options, revision=entry.revision or options.revision)


def check_locked_result(job: BatchJob, entry: LockEntry, outcome: JobOutcome) -> None:
    """Refuse an output that is not the one in the lock: it is moved aside and VerificationError raised.

    A measurement wrote no files that the lock knows, so that it passes.
    """
    was, now = ({f.name: f.sha256 for f in files} for files in (entry.files, outcome.files))
    differing = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    if not differing:
        return
    aside = _move_aside(job.output)
    changed = [f"{k} {entry.versions.get(k)} → {v}" for k, v in outcome.versions.items() if entry.versions.get(k) != v]
    raise VerificationError(
        f"{job.id}: files differ from the lock: {', '.join(differing)}",
        hint=f"the output is kept as `{aside}`; versions: {', '.join(changed) or 'as in the lock'}",
        details={"differences": differing, "versions": changed},
    )


def _job_differences(job: BatchJob, entry: LockEntry, folder: Path) -> Iterator[str]:
    settings = locked_settings(job, folder) | {"kind": job.kind, "model": portable(job.model, folder)}
    locked = entry.settings | {"kind": entry.kind, "model": entry.model}
    for name in sorted(settings.keys() | locked.keys()):
        if settings.get(name) != locked.get(name):
            yield f"{name} is {_show(settings.get(name))} and was {_show(locked.get(name))}"


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _source_differences(entry: LockEntry, folder: Path, *, since: float | None) -> Iterator[str]:
    """Changes of a local source, since a time or, for None, at all."""
    directory = folder / entry.resolved
    if not entry.resolved.startswith(".") or not directory.is_dir():
        return
    for record in entry.source_files:
        if _is_changed(directory / record.name, record, since):
            yield f"source file {record.name} was changed"


def _is_changed(path: Path, record: FileRecord, since: float | None) -> bool:
    """As `make` decides: by size, then by time, and by hash only for files that are newer and have one recorded."""
    if not path.is_file() or path.stat().st_size != record.size_bytes:
        return True
    if since is not None and path.stat().st_mtime < since:
        return False
    if record.sha256 is None:
        return since is not None
    return sha256_of(path) != record.sha256


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _move_aside(output: Path) -> Path:
    names = (output.with_name(f"{output.name}.failed{number or ''}") for number in range(1000))
    aside = next(path for path in names if not path.exists())
    return output.rename(aside)
