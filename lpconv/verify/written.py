"""Verify the files of a conversion before they are published, and again in `lpconv verify`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lpconv.errors import InputError, LpconvError, UnsupportedError, VerificationError, problem_text
from lpconv.gates import CONVERT_GATES, needs_logits
from lpconv.machine import out_of_memory
from lpconv.plan.job import Job
from lpconv.plan.plan import PlannedTensor
from lpconv.plan.workers import SingleThreadedTorch, Workers
from lpconv.progress import Progress
from lpconv.report.tensors import overflow_text
from lpconv.results import LogitsCheck, TensorRecord, VerifyResult, WeightsCheck
from lpconv.storage.residual import find_residual
from lpconv.verify.reader import OutputReader
from lpconv.verify.weights import check_weights, whole_tensors

_SECONDS = 5  # on one core, for comparing weights before publishing: as many whole tensors as fit, pieces of the others


def verify_written(job: Job, directory: Path, tensors: Sequence[TensorRecord], progress: Progress) -> VerifyResult:
    """Check the files in `directory` at the level of the job's options, and its gates.

    Raises UnreadError if disk or network fail: the files then get no verdict, and the run can be resumed.
    """
    level = job.plan.options.verify
    if level == "none" and not job.gates:
        return VerifyResult(level="none", passed=True)
    planned = {t.name: t for t in job.plan.tensors if t.action != "tie"}
    try:
        with OutputReader(directory, tensors, find_residual(directory)) as output:
            weights = check_stored(job, output, planned, progress, whole=whole_tensors(planned.values(), _SECONDS))
    except InputError as e:  # also for the source, which then cannot be compared
        return VerifyResult(level="weights", passed=False, problems=(problem_text(e),))
    problems = weights_problems(weights, tensors)
    logits = None
    if level in ("logits", "auto") or needs_logits(job.gates):
        progress.start("running both models", 0)
        try:
            logits = check_outputs(job, directory, automatic=level == "auto" and not needs_logits(job.gates))
        except VerificationError as e:
            logits, problems = LogitsCheck(skipped=e.message), (*problems, e.message)
        problems += output_problems(logits, tensors)
    ran = logits is not None and logits.skipped is None
    result = VerifyResult(
        level="logits" if ran else "weights", passed=not problems, weights=weights, logits=logits, problems=problems
    )
    gates = CONVERT_GATES.check(job.gates, result)
    return dataclasses.replace(result, gates=gates, passed=result.passed and all(g.passed for g in gates))


def check_stored(
    job: Job,
    output: OutputReader,
    planned: Mapping[str, PlannedTensor],
    progress: Progress,
    *,
    whole: frozenset[str] | None = None,
) -> WeightsCheck:
    """`check_weights` for the job's source, on the job's workers."""
    with SingleThreadedTorch():
        workers = Workers(job.source, job.memory.workers)
        try:
            return check_weights(planned, output, workers, progress, whole=whole)
        finally:
            workers.close()


def weights_problems(weights: WeightsCheck, tensors: Iterable[TensorRecord]) -> tuple[str, ...]:
    """Descriptions of wrong weights, of which `tensors` have the records."""
    overflowed = {t.name: t for t in tensors if t.num_saturated}
    return tuple(
        overflow_text(t) if (t := overflowed.get(n)) else f"tensor `{n}` differs from the source"
        for n in weights.mismatched
    )


def output_problems(logits: LogitsCheck, tensors: Sequence[TensorRecord]) -> tuple[str, ...]:
    """Descriptions of problems with the models' outputs."""
    if logits.skipped or logits.max_abs_diff is None:
        return ()
    if logits.problem:
        return (logits.problem,)
    if logits.bit_equal is False and all(t.max_rel_error == 0 for t in tensors if t.action == "convert"):
        return (f"the weights are exact, but outputs differ by {logits.max_abs_diff:g}",)
    return ()


def check_outputs(job: Job, directory: Path, *, automatic: bool) -> LogitsCheck:
    """Run both models and compare, or record why not. Only an `automatic` comparison may be skipped."""
    skip = job.memory.no_logits if automatic else None
    if skip is not None:
        return LogitsCheck(skipped=skip)
    from lpconv.models.opening import first_line
    from lpconv.verify.logits import check_logits, check_model  # imports transformers (seconds)

    try:
        if not job.memory.in_files:
            check_model(job.plain)
    except LpconvError as e:
        if not automatic:
            raise
        return LogitsCheck(skipped=e.message)
    try:
        return check_logits(
            job.checkpoint,
            directory,
            trust_remote_code=job.plan.options.trust_remote_code,
            in_files=job.memory.in_files,
        )
    except UnsupportedError as e:
        if not automatic:
            raise
        return LogitsCheck(skipped=e.message)
    except LpconvError:
        raise
    except Exception as e:  # transformers raises arbitrary exceptions for unknown checkpoints
        text = f"the model could not be run: {first_line(e)}"
        if not automatic:
            gates = ", without gates on outputs" if needs_logits(job.gates) else ""
            hint = f"run again with --verify weights{gates}, and with --resume to keep the files already written"
            raise out_of_memory(e) or UnsupportedError(text, hint=hint) from e
        return LogitsCheck(skipped=text)
