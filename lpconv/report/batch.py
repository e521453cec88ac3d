"""A batch on the terminal: one line a job."""

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lpconv.report.numbers import size_text
from lpconv.results.batch import DONE, FAILED, NOT_RUN, PLANNED, UP_TO_DATE, BatchResult, JobError, JobResult

__all__ = ["render_batch"]

_STYLES = dict.fromkeys((*DONE.values(), UP_TO_DATE), "green") | {PLANNED: "cyan", FAILED: "red", NOT_RUN: "yellow"}
_MAX_FIGURES = 3


def render_batch(result: BatchResult) -> RenderableType:
    """The jobs as a table, the errors with their hints below it, and a line that counts."""
    table = Table("job", "kind", "status", "what", "found", "time", "note", box=None, pad_edge=False)
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
        Text(job.kind),
        Text(job.status, style=_STYLES[job.status]),
        Text(job.what),
        Text(_found(job)),
        Text(f"{job.seconds:.1f} s"),
        Text(_note(job)),
    )


def _found(job: JobResult) -> str:
    """Sizes and error of a conversion, the first figures of a measurement."""
    sizes = f"{size_text(job.bytes.read)} → {size_text(job.bytes.written)}" if job.bytes else ""
    figures = (f"{name}: {value:.4g}" for name, value in list(job.figures.items())[:_MAX_FIGURES])
    return ", ".join(part for part in (sizes, _sqnr(job), *figures) if part)


def _note(job: JobResult) -> str:
    if job.error is not None:
        return f"{job.error.kind} (exit {job.error.code})"
    if job.estimate is not None:
        needs = job.estimate
        memory, disk = size_text(needs.memory_bytes), size_text(needs.disk_bytes)
        return f"needs {memory} memory, {disk} disk, about {needs.seconds:.0f} s"
    return job.warnings[0] if job.warnings else ""


def _sqnr(job: JobResult) -> str:
    if job.verify is None or job.verify.weights is None:
        return ""
    sqnr_db = job.verify.weights.min_sqnr_db
    return "exact" if math.isinf(sqnr_db) else f"{sqnr_db:.1f} dB"


def _count(result: BatchResult) -> str:
    counts = {status: sum(job.status == status for job in result.jobs) for status in _STYLES}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    return f"{len(result.jobs)} jobs in {result.seconds:.1f} s: {', '.join(parts)}"
