"""The document of a batch, with a row per job, and its JUnit XML for the dashboards of CI systems."""

import re
import xml.etree.ElementTree as ET

from lpconv.errors import VerificationError
from lpconv.report.document import Cell, Document, Outcome, Row, Table, Verdict, section, sections_of
from lpconv.report.numbers import plural, size_text, sqnr_text
from lpconv.results.batch import DONE, FAILED, NOT_RUN, PLANNED, UP_TO_DATE, BatchResult, JobError, JobResult

_OUTCOMES: dict[str, Outcome] = dict.fromkeys((*DONE.values(), UP_TO_DATE), "passed")
_OUTCOMES |= {PLANNED: "not run", FAILED: "failed", NOT_RUN: "not run"}
_MAX_FIGURES = 3
# Characters that XML 1.0 does not allow, even escaped (section 2.2).
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def batch_document(result: BatchResult) -> Document:
    """The jobs as a table, and errors with their hints; the verdict counts jobs by status."""
    failed = ((job.id, job.error) for job in result.jobs if job.error)
    errors = (f"{name}: {e.message}" + (f" (hint: {e.hint})" if e.hint else "") for name, e in failed)
    columns = ("job", "<kind", "<status", "<what", "<result", "time", "<note")
    return Document(
        kind="batch",
        title=result.manifest,
        verdict=Verdict(outcome=_outcome(result), text=_count(result)),
        sections=sections_of(
            section("Jobs", Table(columns=columns, rows=tuple(map(_cells, result.jobs)))),
            section("Errors", tuple(errors), outcome="failed"),
        ),
    )


def _outcome(result: BatchResult) -> Outcome:
    if result.failed:
        return "failed"
    return "not run" if result.dry_run else "passed"


def _cells(job: JobResult) -> Row:
    status = Cell(text=job.status, outcome=_OUTCOMES[job.status])
    return job.id, job.kind, status, job.what, _result_text(job), f"{job.seconds:.1f} s", _note(job)


def _result_text(job: JobResult) -> str:
    """Sizes and error of a conversion, or the first metrics of a measurement."""
    sizes = f"{size_text(job.bytes.read)} → {size_text(job.bytes.written)}" if job.bytes else ""
    sqnr = sqnr_text(job.verify.weights.min_sqnr_db, " dB") if job.verify and job.verify.weights else ""
    figures = (f"{name}: {value:.4g}" for name, value in list(job.figures.items())[:_MAX_FIGURES])
    return ", ".join(part for part in (sizes, sqnr, *figures) if part)


def _note(job: JobResult) -> str:
    if job.error is not None:
        return f"{job.error.kind} (exit {job.error.code})"
    if job.estimate is not None:
        needs = job.estimate
        memory, disk = size_text(needs.memory_bytes), size_text(needs.disk_bytes)
        time = "" if needs.seconds is None else f", about {needs.seconds:.0f} s"
        return f"needs {memory} memory, {disk} disk{time}"
    return job.warnings[0] if job.warnings else ""


def _count(result: BatchResult) -> str:
    counts = {status: sum(job.status == status for job in result.jobs) for status in _OUTCOMES}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    return f"{plural(len(result.jobs), 'job')} in {result.seconds:.1f} s: {', '.join(parts)}"


def junit_xml(result: BatchResult) -> str:
    """The batch as a JUnit test suite with one test case per job, to be written as UTF-8.

    A failed verification or gate is a `failure`, any other error an `error`; jobs that were up to date or not run are
    `skipped`.
    """
    errors = [job.error for job in result.jobs if job.error is not None]
    failures = sum(map(_is_failure, errors))
    skipped = sum(job.status in (UP_TO_DATE, NOT_RUN) for job in result.jobs)
    counts = {"tests": len(result.jobs), "failures": failures, "errors": len(errors) - failures, "skipped": skipped}
    attributes = {name: str(count) for name, count in counts.items()} | {"time": f"{result.seconds:.3f}"}
    root = ET.Element("testsuites", {"name": "lpconv batch", **attributes})
    suite = ET.SubElement(root, "testsuite", {"name": _clean(result.manifest), **attributes})
    for job in result.jobs:
        _add_case(suite, job)
    ET.indent(root)
    # Through bytes: for text, the XML declaration would name the locale's encoding.
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document.decode() + "\n"


def _add_case(suite: ET.Element, job: JobResult) -> None:
    name, time = _clean(job.id), f"{job.seconds:.3f}"
    case = ET.SubElement(suite, "testcase", {"classname": "lpconv.batch", "name": name, "time": time})
    if job.status == FAILED and job.error is not None:
        tag = "failure" if _is_failure(job.error) else "error"
        element = ET.SubElement(case, tag, {"type": job.error.kind, "message": _clean(job.error.message)})
        element.text = _clean(_error_text(job.error))
    elif job.status in (UP_TO_DATE, NOT_RUN):
        ET.SubElement(case, "skipped", {"message": job.status})
    ET.SubElement(case, "system-out").text = _clean(_summary(job))


def _is_failure(error: JobError) -> bool:
    return error.code == VerificationError.exit_code


def _error_text(error: JobError) -> str:
    hint = f"\nhint: {error.hint}" if error.hint else ""
    return f"{error.message} (exit code {error.code}){hint}\n" + "".join(error.details.get("traceback", ()))


def _summary(job: JobResult) -> str:
    lines = [f"{job.kind} {job.model} → {job.output} ({job.what}): {job.status}"]
    if job.source is not None and job.source.revision is not None:
        lines.append(f"source: {job.source.resolved} at {job.source.revision}")
    if job.bytes is not None:
        lines.append(f"bytes: {job.bytes.read} read, {job.bytes.written} written")
    lines += [f"{name}: {value:.6g}" for name, value in job.figures.items()]
    return "\n".join([*lines, *(f"warning: {w}" for w in job.warnings)])


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
