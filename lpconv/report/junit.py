"""A batch as JUnit XML, which the dashboards of CI systems read."""

import re
import xml.etree.ElementTree as ET

from lpconv.errors import VerificationError
from lpconv.results.batch import FAILED, NOT_RUN, UP_TO_DATE, BatchResult, JobError, JobResult

__all__ = ["junit_xml"]

# What XML 1.0 allows in no form, escaped or not (section 2.2).
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(result: BatchResult) -> str:
    """The batch as one test suite with a test case per job; to be written as UTF-8.

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
    # By way of bytes: for text, the declaration would name the locale's encoding.
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
