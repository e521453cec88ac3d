"""A batch on the terminal: one line a job."""

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lpconv.batch.records import CONVERTED, FAILED, NOT_RUN, PLANNED, UP_TO_DATE, BatchResult, JobError, JobResult

__all__ = ["render"]

_STYLES = {CONVERTED: "green", UP_TO_DATE: "green", PLANNED: "cyan", FAILED: "red", NOT_RUN: "yellow"}


def render(result: BatchResult) -> RenderableType:
    """The jobs as a table, the errors with their hints below it, and a line that counts."""
    table = Table(
        "job", "status", "method", "format", "read", "written", "SQNR", "time", "note", box=None, pad_edge=False
    )
    for job in result.jobs:
        table.add_row(*_cells(job))
    notes = [line for job in result.jobs if job.error for line in _error_lines(job.id, job.error)]
    return Group(table, *notes, Text(_count(result)))


def _error_lines(job_id: str, error: JobError) -> Iterator[Text]:
    yield Text(f"{job_id}: {error.message}", style="red")
    if error.hint:
        yield Text(f"  hint: {error.hint}")


def _cells(job: JobResult) -> tuple[RenderableType, ...]:
    return (
        Text(job.id),
        Text(job.status, style=_STYLES[job.status]),
        Text(job.method),
        Text(job.format or ""),
        Text(_size(job.bytes.read) if job.bytes else ""),
        Text(_size(job.bytes.written) if job.bytes else ""),
        Text(_sqnr(job)),
        Text(f"{job.seconds:.1f} s"),
        Text(_note(job)),
    )


def _note(job: JobResult) -> str:
    if job.error is not None:
        return f"{job.error.kind} (exit {job.error.code})"
    if job.estimate is not None:
        needs = job.estimate
        return f"needs {_size(needs.memory_bytes)} memory, {_size(needs.disk_bytes)} disk, about {needs.seconds:.0f} s"
    return job.warnings[0] if job.warnings else ""


def _sqnr(job: JobResult) -> str:
    if job.verify is None or job.verify.weights is None:
        return ""
    sqnr_db = job.verify.weights.min_sqnr_db
    return "exact" if math.isinf(sqnr_db) else f"{sqnr_db:.1f} dB"


def _size(size_bytes: int) -> str:
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _count(result: BatchResult) -> str:
    counts = {status: sum(job.status == status for job in result.jobs) for status in _STYLES}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    return f"{len(result.jobs)} jobs in {result.seconds:.1f} s: {', '.join(parts)}"
