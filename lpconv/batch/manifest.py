"""The manifest of a batch, validated completely before any work."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lpconv.batch.kinds import COMMON_FIELDS, DEFAULT_KIND, KINDS, MANIFEST_VERSION, SHARED_FIELDS, BatchJob
from lpconv.batch.reading import prefix_errors, read_document, read_mapping, read_setting
from lpconv.convert.parts import check_shareable
from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.options import Declared
from lpconv.plan.options import ConvertOptions
from lpconv.storage.remote import is_url
from lpconv.storage.resolve import DEMO, looks_like_path
from lpconv.storage.staging import working_folders

_OF_JOB = "job:"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A parsed manifest. `path` is absolute; paths in the file are relative to its folder."""

    path: Path
    jobs: tuple[BatchJob, ...]

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def lock_path(self) -> Path:
        """Path of the lock file: ``jobs.lock.json`` next to ``jobs.yaml``."""
        return self.path.with_name(self.path.stem + ".lock.json")


def load_manifest(path: Path) -> Manifest:
    """Read and validate a manifest (YAML, TOML or JSON by suffix).

    Every mistake in the file raises a UsageError that names the place, such as ``jobs[2].fromat``: unknown keys, values
    of the wrong type, settings that do not fit together, duplicate ids or outputs.
    """
    path = path.absolute()
    document = read_document(path)
    with prefix_errors(path.name):
        top = read_mapping(document, ("version", "defaults", "jobs"), "")
        if str(version := top.get("version")) != str(MANIFEST_VERSION):
            says = "missing" if version in (None, "") else f"`{version}` is unknown"
            raise UsageError(f"version: {says}", hint=f"this lpconv reads `version: {MANIFEST_VERSION}`")
        defaults = _defaults(top.get("defaults", {}), path.parent)
        jobs: list[BatchJob] = []
        for number, raw in enumerate(_job_list(top)):
            jobs.append(_job(raw, defaults, jobs, path.parent, f"jobs[{number}]"))
        _check_unique(jobs)
    return Manifest(path=path, jobs=tuple(jobs))


def _job_list(top: dict[str, Any]) -> list[Any]:
    jobs = top.get("jobs")
    if not isinstance(jobs, list) or not jobs:
        raise UsageError(
            "jobs: expected a list with at least one job", hint="for example jobs: [{id: first, model: bert-base}]"
        )
    return jobs


def _defaults(raw: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """The default settings for each kind: at the top level for conversions, under the name of the kind for others."""
    others = [kind for kind in KINDS if kind != DEFAULT_KIND]
    given = read_mapping(raw, (*SHARED_FIELDS, *KINDS[DEFAULT_KIND].fields, *others), "defaults", elsewhere=_HINTS)
    shared = {name: given[name] for name in SHARED_FIELDS if name in given}
    own = {kind: given.pop(kind, {}) for kind in others} | {DEFAULT_KIND: given}
    merged = {}
    for kind, settings in own.items():
        place = "defaults" if kind == DEFAULT_KIND else f"defaults.{kind}"
        fields = SHARED_FIELDS | KINDS[kind].fields
        merged[kind] = _read_fields(shared, fields, folder, "defaults") | _read_fields(settings, fields, folder, place)
    return merged


def _read_fields(raw: Any, fields: Mapping[str, Declared], folder: Path, place: str) -> dict[str, Any]:
    """The mapping at `place`, with every value parsed by its field."""
    settings = read_mapping(raw, fields, place, elsewhere=_HINTS)
    for name, value in settings.items():
        with prefix_errors(f"{place}.{name}"):
            settings[name] = read_setting(fields[name], value)
        if fields[name].option.is_path and settings[name] is not None:
            settings[name] = type(settings[name])(_resolve_path(str(settings[name]), folder))
    return settings


def _job(
    raw: Any, defaults: Mapping[str, Mapping[str, Any]], earlier: Sequence[BatchJob], folder: Path, place: str
) -> BatchJob:
    kind = _kind_of_job(raw, place)
    settings = dict(defaults[kind]) | _read_fields(raw, COMMON_FIELDS | KINDS[kind].fields, folder, place)
    own = {key: settings.pop(key) for key in COMMON_FIELDS if key in settings}
    for key in ("id", "model"):
        if key not in own:
            raise UsageError(f"{place}: `{key}` is missing", hint=f"every job needs an id and a model: add `{key}: …`")
    job_id = own["id"]
    model, needs = _model_and_needs(own, earlier, place)
    if is_url(str(own.get("output", ""))):
        raise UsageError(
            f"{place}.output: a job can only write to a local folder",
            hint="copy the output from there, or run `lpconv convert` directly",
        )
    output = folder / Path(own.get("output", f"out/{job_id}")).expanduser()
    if own.get("split", 1) > 1 and kind != DEFAULT_KIND:
        raise UsageError(f"{place}.split: a {kind} job cannot be split", hint="only conversions can be split")
    with prefix_errors(f"{place} ({job_id})"), _hint_defaults(settings, raw):
        options = KINDS[kind].options(settings)
        if own.get("split", 1) > 1 and isinstance(options, ConvertOptions):
            check_shareable(options)
    return BatchJob(
        id=job_id,
        kind=kind,
        model=_resolve_path(model, folder),
        output=Path(os.path.normpath(output)),
        needs=needs,
        **{name: own[name] for name in ("cpus", "gpus", "memory", "split") if name in own},
        options=options,
    )


def _kind_of_job(raw: Any, place: str) -> str:
    if not isinstance(raw, Mapping) or "kind" not in raw:
        return DEFAULT_KIND
    with prefix_errors(f"{place}.kind"):
        return str(read_setting(COMMON_FIELDS["kind"], raw["kind"]))


def _model_and_needs(own: Mapping[str, Any], earlier: Sequence[BatchJob], place: str) -> tuple[str, tuple[str, ...]]:
    """The job's model, with ``job:ID`` replaced by that job's output, and the ids of the jobs to wait for."""
    by_id = {job.id: job for job in earlier}
    with prefix_errors(f"{place}.needs"):
        needs = [find("earlier job", need, by_id).id for need in own.get("needs", ())]
    if not own["model"].startswith(_OF_JOB):
        return own["model"], tuple(needs)
    with prefix_errors(f"{place}.model"):
        source = find("earlier job", own["model"].removeprefix(_OF_JOB), by_id)
    return str(source.output), tuple(dict.fromkeys([source.id, *needs]))


def _resolve_path(name: str, folder: Path) -> str:
    """`name`, made absolute if it is a path: if it looks like one, or if it exists in `folder`."""
    if is_url(name):
        return name
    path = folder / Path(name).expanduser()
    return os.path.normpath(path) if looks_like_path(name) or (name != DEMO and path.exists()) else name


def _check_unique(jobs: Sequence[BatchJob]) -> None:
    numbers: dict[str, int] = {}
    for number, job in enumerate(jobs):
        if job.output == Path(job.model):
            raise UsageError(f"jobs[{number}].output: this is the model itself", hint="use another folder")
        if numbers.setdefault(job.id, number) != number:
            raise UsageError(
                f"jobs[{number}].id: `{job.id}` is the id of jobs[{numbers[job.id]}]",
                hint="give every job a different id",
            )
    # Sorted, a folder is followed by those in it.
    folders = sorted((f.parts, i) for i, job in enumerate(jobs) for f in working_folders(job.output))
    for (outer, a), (inner, b) in pairwise(folders):
        if inner[: len(outer)] == outer:
            earlier, later = jobs[min(a, b)], jobs[max(a, b)]
            raise UsageError(
                f"jobs[{max(a, b)}].output: `{later.output}` and that of `{earlier.id}`, `{earlier.output}`, overlap",
                hint="give every job a folder of its own, and none the name of a working folder such as OUT.partial",
            )


# Hints for settings that belong to another kind of job.
_HINTS = {
    key: f"it is a setting of {' and '.join(f'kind: {name}' for name, kind in KINDS.items() if key in kind.fields)}"
    for key in dict.fromkeys(key for kind in KINDS.values() for key in kind.fields)
}


@contextmanager
def _hint_defaults(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> Iterator[None]:
    """Say in the hint of a UsageError which default replaces a part of the job's own scheme."""
    parts = ("method", "format", "layout", "granularity", "residual")
    inherited = [n for n in parts if settings.get(n) is not None and n not in raw and raw.get("scheme")]
    try:
        yield
    except UsageError as e:
        if not inherited:
            raise
        hint = f"{', '.join(inherited)} of the defaults replaces the scheme's; write `{inherited[0]}: null` in the job"
        raise UsageError(e.message, hint=hint, details=e.details) from e
