"""Run the jobs of a batch in this process or on an executor, and make their records.

A job starts as soon as the jobs that it needs have finished. This module does not depend on the kind of executor. A
task whose machine is lost is submitted again and resumes; a task that fails is not.
"""

import dataclasses
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpconv.batch.kinds import KINDS, BatchJob
from lpconv.batch.options import BatchOptions
from lpconv.batch.task import Answer, Executor, JobTask, MachineLostError, Needs
from lpconv.errors import InterruptedRunError, LpconvError, UnsupportedError, from_system
from lpconv.machine import out_of_memory
from lpconv.progress import Progress
from lpconv.results import from_json, to_json
from lpconv.results.batch import FAILED, NOT_RUN, JobError, JobResult

_MAX_LOST = 3  # machines that may be lost during one task


class JobFailedError(LpconvError):
    """A job failed in another process. Carries that error and its exit code."""

    def __init__(self, job_id: str, error: JobError) -> None:
        super().__init__(f"{job_id}: {error.message}", hint=error.hint, details=error.details)
        self.exit_code, self.kind = error.code, error.kind  # type: ignore[misc]  # those of the error that it stands for


def job_result(job: BatchJob, status: str, **known: Any) -> JobResult:
    """The record of a job with a status, and what else is `known`."""
    return JobResult(
        id=job.id,
        kind=job.kind,
        model=job.model,
        output=str(job.output),
        what=KINDS[job.kind].words(job.options),
        status=status,
        **known,
    )


def job_error(error: BaseException) -> JobError:
    """Convert an exception of a job to its record."""
    error = out_of_memory(error) or from_system(error) or error
    if isinstance(error, LpconvError):
        return JobError(**to_json(error.to_dict()))
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
    return job_result(job, FAILED, error=error_from_answer(answer), seconds=answer.seconds)


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


def _needs_of(job: BatchJob, executor: Executor) -> Needs:
    """Resources for a job: from the manifest, or else an equal share. A bench gets all cores of a machine."""
    largest = Needs(cpus=max(m.cpus for m in executor.machines), memory=max(m.memory for m in executor.machines))
    bound = getattr(job.options, "max_memory", None) or executor.share.memory
    return Needs(
        cpus=job.cpus or (largest.cpus if job.kind == "bench" else executor.share.cpus),
        gpus=job.gpus,
        memory=job.memory or min(bound, largest.memory),
    )


def _check_needs(jobs: Sequence[BatchJob], executor: Executor) -> None:
    """Raise UnsupportedError, before anything starts, if a job needs more than any machine has."""
    for job in jobs:
        needs = _needs_of(job, executor)
        if not any(needs.fits(machine) for machine in executor.machines):
            available = "; ".join(dict.fromkeys(map(str, executor.machines)))
            raise UnsupportedError(
                f"{job.id} needs {needs}, but no machine has that much: {available}",
                hint="lower cpus, gpus or memory in the manifest",
                details={"job": job.id, "needs": dataclasses.asdict(needs)},
            )


@dataclass(eq=False)
class _Step:
    """A waiting or running task of a job, and the number of machines lost during it."""

    job: BatchJob
    task: JobTask
    lost: int = 0


class Schedule:
    """The `jobs` of a manifest, each to run once the jobs that it needs have ended.

    `begin` returns the result of a job that is up to date or that it has run, and None for a job that the executor has
    to run; it raises the error of a job that fails.
    """

    def __init__(
        self,
        manifest: Path,
        jobs: Sequence[BatchJob],
        executor: Executor | None,
        options: BatchOptions,
        *,
        begin: Callable[[BatchJob], JobResult | None],
        progress: Progress,
    ) -> None:
        self._manifest, self._jobs, self._executor, self._begin_job = manifest, jobs, executor, begin
        self._options, self._progress = options, progress
        self._waiting = list(jobs)
        self._steps: list[_Step] = []  # ready to run
        self._running: dict[Future[Answer], _Step] = {}
        self._results: dict[str, JobResult] = {}
        self._seconds: dict[str, float] = {}
        self._failure: BaseException | None = None

    def run(self) -> tuple[tuple[JobResult, ...], BaseException | None]:
        """Run everything. Returns the results of all jobs in order, and the exception of the last failed job."""
        if self._executor is not None:
            _check_needs(self._jobs, self._executor)
        try:
            self._begin()
            while self._running:
                for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                    self._end(self._running.pop(future), future)
                self._begin()
        except BaseException as e:  # signals too: running tasks are stopped and can be resumed
            self._failure = e
            if self._executor is not None:
                self._executor.stop()
            for future, step in list(self._running.items()):
                self._end(step, future)
            self._failure = e
        return tuple(self._results.get(job.id) or job_result(job, NOT_RUN) for job in self._jobs), self._failure

    @property
    def _is_over(self) -> bool:
        return self._failure is not None and stops_batch(self._failure, self._options.keep_going)

    def _begin(self) -> None:
        """Start everything that can start now, in order. A job that is already done may make others ready."""
        while not self._is_over and (job := next(filter(self._is_ready, self._waiting), None)) is not None:
            self._waiting.remove(job)
            self._prepare(job)
        if not self._is_over:
            self._steps = [step for step in self._steps if not self._place(step)]

    def _is_ready(self, job: BatchJob) -> bool:
        """Whether all jobs that `job` needs have ended."""
        return not any(other.id in job.needs and other.id not in self._results for other in self._jobs)

    def _prepare(self, job: BatchJob) -> None:
        """Begin a job: record its result if it is done, failed or must not run, and queue its tasks otherwise."""
        ended = (self._results[need] for need in job.needs if need in self._results)
        if lacking := [r.id for r in ended if r.status in (FAILED, NOT_RUN)]:
            self._results[job.id] = job_result(job, NOT_RUN, warnings=(f"it needs {', '.join(lacking)}",))
            return
        self._report(job.id)
        started = time.monotonic()
        try:
            done = self._begin_job(job)
        except BaseException as e:  # also bugs, which do not stop the other jobs, and signals, which do
            error, seconds = job_error(e), time.monotonic() - started
            self._record(job_result(job, FAILED, error=error, seconds=seconds), e)
            if not isinstance(e, Exception):
                raise
            return
        if done is not None:
            self._record(replace(done, seconds=time.monotonic() - started))
        elif job.split > 1:
            parts = [f"{i}/{job.split}" for i in range(1, job.split + 1)]
            self._steps += [self._step(job, "--shard", part, name=f"{job.id} {part}") for part in parts]
        else:
            self._steps.append(self._step(job))

    def _step(self, job: BatchJob, *more: str, name: str = "") -> _Step:
        given = {"--resume": self._options.resume, "--locked": self._options.locked}
        flags = [flag for flag, is_set in given.items() if is_set]
        arguments = (str(self._manifest), "--only", job.id, "--json", *flags, *more)
        assert self._executor is not None
        needs = _needs_of(job, self._executor)
        return _Step(job=job, task=JobTask(name=name or job.id, arguments=arguments, needs=needs))

    def _place(self, step: _Step) -> bool:
        """Submit a step if a machine has room. Returns whether the step is off the queue."""
        if step.job.id in self._results:  # another part of the job failed
            return True
        assert self._executor is not None
        future = self._executor.submit(step.task)
        if future is not None:
            self._running[future] = step
        return future is not None

    def _end(self, step: _Step, future: Future[Answer]) -> None:
        try:
            answer = future.result()
        except MachineLostError as e:
            self._resubmit(step, e)
        except Exception as e:
            self._record(job_result(step.job, FAILED, error=job_error(e)), e)
        else:
            self._record_answer(step, answer)

    def _resubmit(self, step: _Step, error: MachineLostError) -> None:
        """Submit the task of a lost machine again with --resume, up to a limit."""
        if step.lost == _MAX_LOST or self._is_over:
            lost = JobError(code=1, kind="machine", message=str(error), hint="run again with --resume")
            self._finish_job(step.job, job_result(step.job, FAILED, error=lost))
            return
        self._progress.message(f"{step.task.name}: {error}; once more")
        again = dict.fromkeys((*step.task.arguments, "--resume"))  # adds --resume only once
        self._steps.append(_Step(job=step.job, task=replace(step.task, arguments=tuple(again)), lost=step.lost + 1))

    def _record_answer(self, step: _Step, answer: Answer) -> None:
        """Record the end of a task: the job's result, its failure, or a finished part."""
        job = step.job
        if job.id in self._results:
            return
        if "--shard" not in step.task.arguments:
            self._finish_job(job, result_from_answer(job, answer))
        elif answer.code != 0:
            self._finish_job(job, job_result(job, FAILED, error=error_from_answer(answer)))
        else:
            self._seconds[job.id] = max(self._seconds.get(job.id, 0.0), answer.seconds)
            if not any(other.job is job for other in (*self._steps, *self._running.values())):  # the last part
                self._steps.append(self._step(job, "--finish"))

    def _finish_job(self, job: BatchJob, result: JobResult) -> None:
        """Record the result of a job; its time includes the time of the longest part."""
        result = replace(result, seconds=result.seconds + self._seconds.get(job.id, 0.0))
        self._record(result, JobFailedError(job.id, result.error) if result.error else None)

    def _record(self, result: JobResult, error: BaseException | None = None) -> None:
        if result.id not in self._results:
            self._results[result.id] = result
            self._failure = error or self._failure
            self._report(result.id, f": {result.status}")

    def _report(self, job_id: str, status: str = "") -> None:
        """Report the beginning of a job, or its end with its status."""
        ids, ended = [job.id for job in self._jobs], [r for r in self._results.values() if r.status != NOT_RUN]
        self._progress.start("batch", len(ids), unit="jobs", done=len(ended))
        self._progress.message(f"[{ids.index(job_id) + 1}/{len(ids)}] {job_id}{status}")
