"""Run the jobs of a manifest. The runners are passed in, so this module does not import torch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lpconv.batch.kinds import KINDS, BatchJob
from lpconv.batch.lock import Lock, check_lockable, check_locked, lock_entry, read_lock, stale_reasons, update_lock
from lpconv.batch.manifest import Manifest
from lpconv.batch.options import BatchOptions
from lpconv.batch.placed import Schedule, job_result, stops_batch
from lpconv.batch.runners import JobRunner
from lpconv.batch.task import Executor
from lpconv.bench.options import BenchOptions
from lpconv.errors import BatchError, InputError, OutputExistsError
from lpconv.lookup import find
from lpconv.progress import Progress, Silent
from lpconv.results import to_json
from lpconv.results.batch import DONE, PLANNED, UP_TO_DATE, BatchResult, JobFindings, JobResult
from lpconv.results.documents import fields_from

_ALL_JOBS = BatchOptions()


class JobsFailedError(BatchError):
    """The batch finished and some jobs failed. `result` holds all results, and `details` the same as JSON."""

    def __init__(self, result: BatchResult) -> None:
        failed = [job.id for job in result.failed]
        super().__init__(
            f"{len(failed)} of {len(result.jobs)} jobs failed: {', '.join(failed)}",
            hint="fix them and run again with --resume, which skips jobs that are up to date",
            details=to_json(result),
        )
        self.result = result


def run_batch(
    manifest: Manifest,
    runners: Mapping[str, JobRunner],
    options: BatchOptions = _ALL_JOBS,
    *,
    progress: Progress | None = None,
    on_result: Callable[[BatchResult], object] = lambda result: None,
    executor: Executor | None = None,
) -> BatchResult:
    """Run the jobs in order, each with the runner of its kind, and update the lock file after every job.

    With an `executor`, jobs run there in their own processes, each as soon as the jobs that it needs have finished.

    `only` selects jobs by id, `dry_run` only plans them, `resume` skips jobs whose output is up to date and continues
    interrupted ones. `locked` takes revisions from the lock, does not update it, and fails on any difference.

    After a failure the batch stops and raises that job's error. With `keep_going` it runs the remaining jobs, except
    those that need a failed one, and raises JobsFailedError. An interruption always stops it. In each case
    `on_result` receives the result first.
    """
    jobs = select_jobs(manifest, options.only)
    reads_lock = options.locked or options.dry_run
    lock = read_lock(manifest.lock_path) if reads_lock else update_lock(manifest.lock_path)  # before any work
    if options.locked:
        check_lockable(manifest, jobs, lock)
    progress, started = progress or Silent(), time.monotonic()
    batch_run = _BatchRun(manifest, lock or Lock(), runners, options, progress)
    place = None if options.dry_run else executor
    begin = batch_run.run_job if place is None else batch_run.known_result
    schedule = Schedule(manifest.path, jobs, place, options, begin=begin, progress=progress)
    try:
        results, failure = schedule.run()
    finally:
        if place is not None:
            place.close()
    seconds = time.monotonic() - started
    batch = BatchResult(manifest=str(manifest.path), dry_run=options.dry_run, seconds=seconds, jobs=results)
    on_result(batch)
    if failure is None:
        return batch
    raise failure if stops_batch(failure, options.keep_going) else JobsFailedError(batch)


@dataclass
class _BatchRun:
    """Runs single jobs with the settings of this batch; `lock` gains an entry for every finished job."""

    manifest: Manifest
    lock: Lock
    runners: Mapping[str, JobRunner]
    options: BatchOptions
    progress: Progress

    def run_job(self, job: BatchJob) -> JobResult:
        """Run or plan a job and return its result; raises the job's exception if it fails."""
        known = self.known_result(job)
        if known is not None:
            return known
        runner, asked = self.runners[job.kind], self._with_batch_options(job)
        if self.options.dry_run:
            return job_result(job, PLANNED, **fields_from(JobFindings, runner.plan(asked)))
        outcome, entry = runner.run(asked, self.progress), self.lock.get(job.id)
        if self.options.locked and entry is not None:
            check_locked(job, entry, outcome)
        else:
            entry = lock_entry(job, outcome, self.manifest.folder)
            self.lock = update_lock(self.manifest.lock_path, lambda lock: lock.with_entry(entry, self.manifest.jobs))
        return job_result(job, DONE[job.kind], **fields_from(JobFindings, outcome))

    def known_result(self, job: BatchJob) -> JobResult | None:
        """The result of a job that needs no work, or None. Raises an error for a job that must not run."""
        lacking = [need for need in job.needs if not self._output_of(need).exists()]
        if lacking and self.options.dry_run:
            return job_result(job, PLANNED, warnings=(f"cannot be planned until {', '.join(lacking)} is done",))
        if lacking:
            raise InputError(
                f"{job.id} needs the output of {lacking[0]}, but `{self._output_of(lacking[0])}` does not exist",
                hint=f"run {lacking[0]} first, or include it in this batch",
            )
        return self._up_to_date(job)

    def _up_to_date(self, job: BatchJob) -> JobResult | None:
        """The record of a job that is up to date, if resuming. Raises OutputExistsError for a stale output."""
        entry = self.lock.get(job.id)
        if not self.options.resume or not _is_finished(job) or entry is None:
            return None
        reasons = stale_reasons(job, entry, self.manifest.folder)
        if not reasons:
            return job_result(job, UP_TO_DATE)
        if job.options.force:
            return None
        raise OutputExistsError(
            f"output `{job.output}` exists but is out of date: {'; '.join(reasons)}",
            hint="delete it, choose another output, or set `force: true` in the job",
        )

    def _with_batch_options(self, job: BatchJob) -> BatchJob:
        """A copy of the job with the batch's `resume`, `force` and locked revision."""
        entry, options = self.lock.get(job.id), job.options
        if self.options.locked and entry and not isinstance(options, BenchOptions):  # benches use the cached revision
            options = replace(options, revision=entry.revision or options.revision)
        # Interrupted jobs are resumed; `force` applies to finished, outdated outputs. An output without a lock entry
        # may come from a run that was killed before it wrote the entry: it is accepted if the same command made it.
        resume = self.options.resume and (not _is_finished(job) or entry is None)
        return replace(job, options=replace(options, resume=resume, force=options.force and not resume))

    def _output_of(self, job_id: str) -> Path:
        return next(job.output for job in self.manifest.jobs if job.id == job_id)


def _is_finished(job: BatchJob) -> bool:
    """Whether a job's output is finished and met its gates. A conversion's output exists only in that case."""
    kind, proof = KINDS[job.kind], job.output / KINDS[job.kind].proof
    return job.output.exists() if kind.is_exact else proof.is_file() and kind.accepts(proof)


def select_jobs(manifest: Manifest, only: Sequence[str]) -> tuple[BatchJob, ...]:
    """The jobs with the given ids; all if `only` is empty. Raises UsageError for an unknown id."""
    by_id = {job.id: job for job in manifest.jobs}
    selected = {find("job", job_id, by_id).id for job_id in only}
    return tuple(job for job in manifest.jobs if job.id in selected or not only)
