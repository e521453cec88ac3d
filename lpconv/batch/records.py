"""Results of jobs as records, for jobs run in this process and in others."""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lpconv.batch.kinds import KINDS, BatchJob
from lpconv.batch.task import Answer
from lpconv.errors import InterruptedRunError, LpconvError, from_system
from lpconv.machine import out_of_memory
from lpconv.results import from_json, to_json
from lpconv.results.batch import FAILED, NOT_RUN, JobError, JobFindings, JobOutcome, JobResult
from lpconv.results.documents import fields_from


class JobFailedError(LpconvError):
    """A job failed in another process. Carries that error and its exit code."""

    def __init__(self, job_id: str, error: JobError) -> None:
        super().__init__(f"{job_id}: {error.message}", hint=error.hint, details=error.details)
        self.exit_code, self.kind = error.code, error.kind  # type: ignore[misc]  # those of the error that it stands for


def job_result(job: BatchJob, status: str) -> JobResult:
    """The record of a job for which only the status is known."""
    return JobResult(
        id=job.id,
        kind=job.kind,
        model=job.model,
        output=str(job.output),
        what=KINDS[job.kind].words(job.options),
        status=status,
    )


def failed_needs(job: BatchJob, results: Iterable[JobResult]) -> list[str]:
    """Ids of the jobs that `job` needs and that failed or were not run, according to the results so far."""
    return [r.id for r in results if r.id in job.needs and r.status in (FAILED, NOT_RUN)]


def job_not_run(job: BatchJob, lacking: Sequence[str]) -> JobResult:
    """The record of a job that is not run because the jobs `lacking`, which it needs, did not finish."""
    return replace(job_result(job, NOT_RUN), warnings=(f"it needs {', '.join(lacking)}",))


def fill_outcome(result: JobResult, outcome: JobOutcome) -> JobResult:
    """A copy of a job's record with the outcome of running or planning it."""
    return replace(result, **fields_from(JobFindings, outcome))


def failed_job(job: BatchJob, error: JobError) -> JobResult:
    """The record of a job that failed."""
    return replace(job_result(job, FAILED), error=error)


def job_error(error: BaseException) -> JobError:
    """Convert an exception of a job to its record."""
    error = out_of_memory(error) or from_system(error) or error
    if isinstance(error, LpconvError):
        return JobError(code=error.exit_code, kind=error.kind, message=error.message, hint=error.hint,
                        details=to_json(error.details))  # fmt: skip
    if not isinstance(error, Exception):
        # SIGINT raises KeyboardInterrupt; anything else comes from a SIGTERM handler.
        code = 130 if isinstance(error, KeyboardInterrupt) else 143
        return JobError(code=code, kind=InterruptedRunError.kind, message="interrupted", hint="run again with --resume")
    return JobError(
        code=1,
        kind="bug",
        message=f"{type(error).__name__}: {error}",
        hint="this is a bug in lpconv; please report it with the traceback in the details",
        details={"traceback": traceback.format_exception(error)},
    )


def result_from_answer(job: BatchJob, answer: Answer) -> JobResult:
    """The record of a job, from the answer of the process that ran `lpconv batch --only ID --json`."""
    document = answer.document or {}
    if answer.code == 0 and len(document.get("jobs", ())) == 1:
        return from_json(JobResult, document["jobs"][0])
    return replace(failed_job(job, error_from_answer(answer)), seconds=answer.seconds)


def error_from_answer(answer: Answer) -> JobError:
    """Why a process failed: the error that it printed, or else its exit status and last line of output."""
    document, code = answer.document or {}, answer.code
    if "error" in document:
        error = from_json(JobError, document["error"])
        return replace(error, kind="bug") if error.code == 1 else error
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return JobError(
        code=128 - code if code < 0 else code or 1,
        kind="crash",
        message=f"the process of the job {how}" + (f": {answer.last:.200}" if answer.last else ""),
        hint="it may have run out of memory; run again with --resume",
    )


def stops_batch(failure: BaseException, keep_going: bool) -> bool:
    """Whether a failure stops the batch."""
    return not keep_going or isinstance(failure, InterruptedRunError) or not isinstance(failure, Exception)
