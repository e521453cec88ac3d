"""The manifest of a batch: what it may say, checked before any work."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpconv.batch.document import read_document
from lpconv.batch.fields import FIELDS, read_mapping, read_text
from lpconv.checkpoint.resolve import DEMO, looks_like_path
from lpconv.convert.options import ConvertOptions, with_defaults
from lpconv.errors import UsageError

__all__ = ["DEFAULT_KEYS", "JOB_KEYS", "MANIFEST_KEYS", "MANIFEST_VERSION", "Job", "Manifest", "load_manifest"]

MANIFEST_VERSION = 1
MANIFEST_KEYS = ("version", "defaults", "jobs")
DEFAULT_KEYS = ("model", *FIELDS)
JOB_KEYS = ("id", "model", "output", *FIELDS)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One conversion. `model` is a hub id, an alias or an absolute path; `options` have their defaults filled in."""

    id: str
    model: str
    output: Path
    options: ConvertOptions


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A batch, as its file says: `path` is absolute, and paths in the file are relative to its folder."""

    path: Path
    jobs: tuple[Job, ...]

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def lock_path(self) -> Path:
        """Where the lock of this manifest lies: ``jobs.yaml`` has ``jobs.lock.json`` beside it."""
        return self.path.with_name(self.path.stem + ".lock.json")


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest (YAML, TOML or JSON by suffix).

    Everything a file can get wrong is a UsageError that names the place, such as ``jobs[2].fromat``: unknown keys,
    values of the wrong kind, settings that do not fit together, jobs with the same id or output.
    """
    path = path.absolute()
    document = read_document(path)
    with _at(path.name):
        top = read_mapping(document, MANIFEST_KEYS, "")
        _check_version(top.get("version"))
        defaults = _settings(top.get("defaults", {}), DEFAULT_KEYS, "defaults")
        jobs = tuple(_job(raw, defaults, path.parent, f"jobs[{i}]") for i, raw in enumerate(_job_list(top)))
        _check_unique(jobs)
    return Manifest(path=path, jobs=jobs)


def _check_version(version: Any) -> None:
    if str(version) != str(MANIFEST_VERSION):
        says = "missing" if version in (None, "") else f"`{version}` is unknown"
        raise UsageError(f"version: {says}", hint=f"this lpconv reads `version: {MANIFEST_VERSION}`")


def _job_list(top: dict[str, Any]) -> list[Any]:
    jobs = top.get("jobs")
    if not isinstance(jobs, list) or not jobs:
        raise UsageError("jobs: expected a list with at least one job", hint="a job is {id: …, model: …}")
    return jobs


def _settings(raw: Any, known: tuple[str, ...], place: str) -> dict[str, Any]:
    """The mapping at `place` with every value read by its field."""
    settings = read_mapping(raw, known, place)
    for name, value in settings.items():
        with _at(f"{place}.{name}"):
            settings[name] = FIELDS[name].value(value) if name in FIELDS else read_text(value)
    return settings


def _job(raw: Any, defaults: dict[str, Any], folder: Path, place: str) -> Job:
    settings = defaults | _settings(raw, JOB_KEYS, place)
    for key in ("id", "model"):
        if key not in settings:
            raise UsageError(f"{place}: `{key}` is missing", hint=f"every job needs an id and a model; add `{key}: …`")
    job_id = settings.pop("id")
    if not _ID.fullmatch(job_id):
        raise UsageError(f"{place}.id: `{job_id}` is no id", hint="use letters, digits, dots, dashes and underscores")
    model = _model(settings.pop("model"), folder)
    output = Path(os.path.normpath(folder / Path(settings.pop("output", f"out/{job_id}")).expanduser()))
    with _at(f"{place} ({job_id})"):
        options, _ = with_defaults(ConvertOptions(**settings))
    return Job(id=job_id, model=model, output=output, options=options)


def _model(name: str, folder: Path) -> str:
    """`name`, made absolute where it is a path: where it looks like one, or where the folder has a directory of it."""
    path = folder / Path(name).expanduser()
    return os.path.normpath(path) if looks_like_path(name) or (name != DEMO and path.is_dir()) else name


def _check_unique(jobs: tuple[Job, ...]) -> None:
    for number, job in enumerate(jobs):
        if job.output == Path(job.model):
            raise UsageError(f"jobs[{number}].output: is the model itself", hint="name another folder")
        for earlier_number, earlier in enumerate(jobs[:number]):
            if job.id == earlier.id:
                raise UsageError(
                    f"jobs[{number}].id: `{job.id}` is the id of jobs[{earlier_number}]", hint="ids are unique"
                )
            if job.output.is_relative_to(earlier.output) or earlier.output.is_relative_to(job.output):
                raise UsageError(
                    f"jobs[{number}].output: `{job.output}` and that of `{earlier.id}`, `{earlier.output}`, overlap",
                    hint="give every job a folder of its own",
                )


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put `place` before the message of a UsageError, which may itself begin with a place inside of it."""
    try:
        yield
    except UsageError as e:
        separator = "" if e.message.startswith(("[", ".")) else ": "
        raise UsageError(f"{place}{separator}{e.message}", hint=e.hint, details=e.details) from e
