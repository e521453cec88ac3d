"""How jobs of each kind are run and planned.

Here models are loaded; what takes seconds to import is imported where a job needs it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lpconv.batch.kinds import BENCH_FILE, BenchSettings, ProbeSettings
from lpconv.batch.manifest import Job
from lpconv.bench.outcome import compare, problem
from lpconv.bench.presets import PRESETS
from lpconv.bench.run import bench
from lpconv.bench.saved import kept, read_bench
from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.resolve import resolve
from lpconv.convert.options import ConvertOptions
from lpconv.errors import OutputExistsError
from lpconv.gates import BENCH_GATES, FINETUNE_GATES, check_rows
from lpconv.progress import Progress
from lpconv.results import BenchResult, ConvertResult, FileRecord, FinetuneResult, PlanResult, SourceRecord
from lpconv.results.batch import Estimate, Outcome
from lpconv.train.gates import gate_problem
from lpconv.train.options import FinetuneOptions

__all__ = ["RUNNERS", "Runner", "converted", "planned"]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """What does one kind of job, and what says beforehand what it would do, as far as that can be said.

    Both raise an `LpconvError` for every failure that is not a bug. A job is done when `run` returns.
    """

    run: Callable[[Job, Progress], Outcome]
    plan: Callable[[Job], Outcome]


def converted(result: ConvertResult) -> Outcome:
    """A conversion's outcome."""
    return Outcome(
        source=result.source,
        files=result.files,
        bytes=result.bytes,
        verify=result.verify,
        warnings=result.warnings,
        versions=result.versions,
    )


def planned(plan: PlanResult) -> Outcome:
    """The outcome of planning a conversion."""
    estimate = Estimate(
        memory_bytes=plan.memory_bytes,
        disk_bytes=plan.disk_bytes,
        disk_free_bytes=plan.disk_free_bytes,
        seconds=plan.seconds,
    )
    return Outcome(source=plan.source, bytes=plan.bytes, estimate=estimate, warnings=plan.warnings)


def _convert(job: Job, progress: Progress) -> Outcome:
    from lpconv.convert.run import convert

    assert isinstance(job.options, ConvertOptions)
    return converted(convert(job.model, job.output, job.options, progress=progress))


def _plan_conversion(job: Job) -> Outcome:
    from lpconv.convert.run import plan

    assert isinstance(job.options, ConvertOptions)
    return planned(plan(job.model, job.output, job.options))


def _finetune(job: Job, progress: Progress) -> Outcome:
    from lpconv.train.run import finetune

    assert isinstance(job.options, FinetuneOptions)
    source = _source(job, revision=job.options.revision)
    result = finetune(job.model, job.output, job.options, telling=_Telling(progress))
    error = gate_problem(result)
    if error is not None:
        raise error
    return Outcome(source=source, figures=_finetune_figures(result), warnings=result.warnings, versions=result.versions)


def _bench(job: Job, progress: Progress) -> Outcome:
    options = job.options
    assert isinstance(options, BenchSettings)
    path = job.output / BENCH_FILE
    if path.exists() and not (options.force or options.resume):
        raise OutputExistsError(f"`{path}` exists", hint="set `force: true` in the job, or name another output")
    gates = tuple(map(BENCH_GATES.parse, options.gates))
    old = read_bench(Path(options.compare)) if options.compare else None
    source = _source(job)

    def judged(result: BenchResult) -> BenchResult:
        changes = compare(result.rows, old) if old else ()
        return dataclasses.replace(result, gates=check_rows(gates, result.rows), changes=changes)

    with kept(path, judged, lambda partial: None) as keep:
        asked = dataclasses.replace(options, model=job.model)
        result = keep(bench(asked, progress=progress, on_result=keep))
    error = problem(result)
    if error is not None:
        error.details.pop("result")  # it lies in the output
        raise error
    speedups = {
        f"speedup {r.name}, {r.place}": r.ratio.value for r in result.rows if r.ratio is not None and not r.is_baseline
    }
    return Outcome(source=source, figures=speedups, warnings=result.notes, versions=result.versions)


def _probe(job: Job, progress: Progress) -> Outcome:
    from lpconv.convert.ranges import format_ranges
    from lpconv.probe.answers import answer
    from lpconv.probe.calibrate import calibrate_checkpoint
    from lpconv.probe.checkpoint import probe_checkpoint
    from lpconv.probe.output import check_free, write_output
    from lpconv.report.probe.html import html_probe
    from lpconv.scaled.disk import write_factors

    options = job.options
    assert isinstance(options, ProbeSettings)
    check_free(job.output, force=options.force)
    source = _source(job, revision=options.revision)
    result = probe_checkpoint(job.model, options, progress=progress)
    factors = calibrate_checkpoint(job.model, options, progress=progress) if options.calibrate else None
    answers = answer(result)
    write_output(job.output, result, html_probe(answers, format_ranges()))
    if factors is not None:
        write_factors(job.output, factors)
    return Outcome(source=source, warnings=tuple(result.options["warnings"]), versions=dict(result.options["versions"]))


def _look(job: Job) -> Outcome:
    """A measurement is not estimated; that its model is there is said beforehand."""
    revision = None if isinstance(job.options, BenchSettings) else job.options.revision
    return Outcome(source=_source(job, revision=revision))


RUNNERS: dict[str, Runner] = {
    "convert": Runner(run=_convert, plan=_plan_conversion),
    "finetune": Runner(run=_finetune, plan=_look),
    "bench": Runner(run=_bench, plan=_look),
    "probe": Runner(run=_probe, plan=_look),
}


def _source(job: Job, *, revision: str | None = None) -> SourceRecord:
    """What the job's model is, with the sizes of its weight files; a bench's preset has none."""
    if isinstance(job.options, BenchSettings) and job.model in PRESETS:
        return SourceRecord(name=job.model, resolved=job.model)
    found = resolve(job.model, revision=revision)
    contents = read_contents(found.directory)
    files = (FileRecord(name=f, size_bytes=(found.directory / f).stat().st_size) for f in contents.weight_files)
    return SourceRecord(name=job.model, resolved=found.resolved, revision=found.revision, files=tuple(files))


def _finetune_figures(result: FinetuneResult) -> dict[str, float]:
    """Those that gates can ask for, where they were measured."""
    figures = {name: figure(result) for name, figure in FINETUNE_GATES.metrics.items()}
    return {name: value for name, value in figures.items() if value is not None}


class _Telling:
    """Says on a `Progress` how far a training run is."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._words, self._steps = progress, "", 0

    def begin(self, words: str, steps: int, done: int) -> None:
        self._words, self._steps = words, steps

    def step(self, step: int, loss: float) -> None:
        self._progress.start(f"{self._words}: step {step} of {self._steps}, loss {loss:.4f}", 0)

    def message(self, text: str) -> None:
        self._progress.message(text)
