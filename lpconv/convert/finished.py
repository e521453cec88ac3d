"""`--resume` after the earlier run has published: check the output and report that nothing is left to do."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from lpconv.data import text_at
from lpconv.errors import OutputExistsError
from lpconv.extras import delete_records, head, view_of
from lpconv.plan.job import Job
from lpconv.plan.provenance import public_source, source_record, versions
from lpconv.plan.settings import shaping_options
from lpconv.progress import Progress
from lpconv.results import ConvertResult, from_json, to_json
from lpconv.storage.contents import read_json
from lpconv.storage.partfile import sha256_of
from lpconv.storage.staging import JOURNAL, MARKER, read_marker
from lpconv.storage.urls import check_url
from lpconv.verify.run import check_hashes

_DEPTH = ("none", "auto", "weights", "logits")


def finished_output(job: Job, progress: Progress) -> ConvertResult | None:
    """The record of an output that the same command made; None if there is no lpconv output.

    Raises OutputExistsError for an output of another command, source or version, and for one that was damaged since.
    """
    if job.url is not None:
        if head(check_url(job.url), MARKER) is None:
            return None
        delete_records(job.url)
        job = dataclasses.replace(job, output=view_of(job.url, whole=False))
    if not (job.output / MARKER).is_file():
        return None
    changed = _changed_facts(job, read_marker(job.output))
    if changed:
        raise OutputExistsError(
            f"`{job.url or job.output}` was made with other {', '.join(changed)}",
            hint="choose another --output, or replace it with --force",
            details={"changed": changed},
        )
    damaged = check_hashes(job.output, progress).mismatched
    if damaged:
        raise OutputExistsError(
            f"`{job.url or job.output}` is damaged: `{damaged[0]}` no longer matches its SHA-256",
            hint="write it again with --force",
            details={"mismatched": list(damaged)},
        )
    (job.output / JOURNAL).unlink(missing_ok=True)  # left by a run that was killed between publishing and cleaning up
    return from_json(ConvertResult, read_json(job.output / "report.json"))


def _changed_facts(job: Job, record: dict[str, Any]) -> list[str]:
    """Facts in which the output's record differs from the job, like `identity` for an unfinished run."""
    wanted = {
        "options": shaping_options(job.plan.options),
        "source": to_json(public_source(source_record(job))),
        "versions": versions(),
    }
    changed = [name for name, value in wanted.items() if record.get(name) != json.loads(json.dumps(value))]
    text = job.plan.options.calibrate
    if text is not None and (record.get("calibration") or {}).get("sha256") != sha256_of(text_at(text)):
        changed.append("calibration text")
    verify: dict[str, Any] = record.get("verify") or {}
    gates = [g.get("expression") for g in verify.get("gates") or ()]
    if gates != [g.expression for g in job.gates]:
        changed.append("gates")
    asked, ran = job.plan.options.verify, verify.get("level")
    if ran not in _DEPTH or (asked != "auto" and _DEPTH.index(ran) < _DEPTH.index(asked)):
        changed.append("verification")
    published = (job.output / MARKER).stat().st_mtime_ns
    if any(_time_ns(job.watch.directory / name) > published for name in job.watch.seen):
        changed.append("source files")
    return changed


def _time_ns(path: Path) -> int:
    return path.stat().st_mtime_ns
