"""How jobs of each kind are run and planned.

This module loads models; slow imports are inside the functions that need them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lpconv.batch.kinds import BENCH_FILE, BatchJob
from lpconv.batch.lock import LockEntry
from lpconv.bench.options import BenchOptions
from lpconv.bench.outcome import final_error, judge_of, keep_results
from lpconv.bench.run import bench
from lpconv.convert.parts import Part
from lpconv.errors import OutputExistsError
from lpconv.gates import FINETUNE_GATES
from lpconv.models.presets import PRESETS
from lpconv.plan.options import ConvertOptions
from lpconv.probe.options import ProbeOptions
from lpconv.progress import Progress
from lpconv.results import JobEstimate, JobOutcome, PartResult, SourceRecord
from lpconv.results.documents import fields_from
from lpconv.storage.checkpoint import Checkpoint
from lpconv.train.options import FinetuneOptions
from lpconv.train.outcome import gate_problem


@dataclass(frozen=True, kw_only=True)
class JobRunner:
    """Functions that run and plan one kind of job. A plan describes the job without doing it.

    Both raise an `LpconvError` for every failure that is not a bug. A job is done when `run` returns.
    """

    run: Callable[[BatchJob, Progress], JobOutcome]
    plan: Callable[[BatchJob], JobOutcome]


def _convert(job: BatchJob, progress: Progress, *, from_parts: bool = False) -> JobOutcome:
    from lpconv.convert import run

    assert isinstance(job.options, ConvertOptions)
    convert = run.finish if from_parts else run.convert
    return JobOutcome(**fields_from(JobOutcome, convert(job.model, job.output, job.options, progress=progress)))


def write_part(job: BatchJob, part: Part, *, entry: LockEntry | None, resume: bool, progress: Progress) -> PartResult:
    """Write one part of a conversion that several workers share, at the revision of the lock's `entry` if given."""
    from lpconv.convert.parts import convert_part

    assert isinstance(job.options, ConvertOptions)
    revision = job.options.revision if entry is None else entry.revision
    options = dataclasses.replace(job.options, resume=resume, revision=revision)
    return convert_part(job.model, job.output, options, part, progress=progress)


def _plan_conversion(job: BatchJob) -> JobOutcome:
    from lpconv.convert.run import plan

    assert isinstance(job.options, ConvertOptions)
    planned = plan(job.model, job.output, job.options)
    estimate = JobEstimate(**fields_from(JobEstimate, planned))
    return JobOutcome(**fields_from(JobOutcome, planned), estimate=estimate)


def _finetune(job: BatchJob, progress: Progress) -> JobOutcome:
    from lpconv.train.run import finetune

    assert isinstance(job.options, FinetuneOptions)
    checkpoint = Checkpoint.open(job.model, revision=job.options.revision)
    source = checkpoint.record()
    result = finetune(checkpoint, job.output, job.options, progress=progress)
    error = gate_problem(result)
    if error is not None:
        raise error
    figures = FINETUNE_GATES.values(result)
    return JobOutcome(source=source, figures=figures, warnings=result.warnings, versions=result.versions)


def _bench(job: BatchJob, progress: Progress) -> JobOutcome:
    options = job.options
    assert isinstance(options, BenchOptions)
    path = job.output / BENCH_FILE
    if path.exists() and not (options.force or options.resume):
        raise OutputExistsError(f"`{path}` exists", hint="set `force: true` in the job, or choose another output")
    judged = judge_of(options)
    source = _source(job)
    with keep_results(path, judged, lambda partial: None) as keep:
        asked = dataclasses.replace(options, model=job.model)
        result = keep(bench(asked, progress=progress, on_result=keep))
    error = final_error(result)
    if error is not None:
        error.details.pop("result")  # it is stored in the output
        raise error
    speedups = {
        f"speedup {r.name}, {r.place}": r.ratio.value for r in result.rows if r.ratio is not None and not r.is_baseline
    }
    return JobOutcome(source=source, figures=speedups, warnings=result.notes, versions=result.versions)


def _probe(job: BatchJob, progress: Progress) -> JobOutcome:
    from lpconv.probe.run import run_probe

    options = job.options
    assert isinstance(options, ProbeOptions)
    checkpoint = Checkpoint.open(job.model, revision=options.revision)
    source = checkpoint.record()
    result, _ = run_probe(checkpoint, job.output, options, progress=progress)
    return JobOutcome(
        source=source, warnings=tuple(result.options["warnings"]), versions=dict(result.options["versions"])
    )


def _plan_measurement(job: BatchJob) -> JobOutcome:
    """Plan a measurement: only its model is resolved, nothing is estimated."""
    return JobOutcome(source=_source(job))


RUNNERS: dict[str, JobRunner] = {
    "convert": JobRunner(run=_convert, plan=_plan_conversion),
    "finetune": JobRunner(run=_finetune, plan=_plan_measurement),
    "bench": JobRunner(run=_bench, plan=_plan_measurement),
    "probe": JobRunner(run=_probe, plan=_plan_measurement),
}


# Runners that combine the parts of conversions that workers have written.
FINISHING = RUNNERS | {"convert": JobRunner(run=partial(_convert, from_parts=True), plan=_plan_conversion)}


def _source(job: BatchJob) -> SourceRecord:
    """The source record of a job's model, with sizes of its weight files. A bench preset has no files."""
    if not isinstance(job.options, BenchOptions):
        return Checkpoint.open(job.model, revision=job.options.revision).record()
    if job.model in PRESETS:
        return SourceRecord(name=job.model, resolved=job.model)
    return Checkpoint.open(job.model).record()
