"""Verify weights that have just been written, before anything is published."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lpconv.checkpoint.residual import find_residual
from lpconv.convert.job import Job
from lpconv.convert.reader import OutputReader
from lpconv.convert.verify import check_samples
from lpconv.convert.workers import SingleThreadedTorch
from lpconv.errors import LpconvError, UnsupportedError
from lpconv.gates import CONVERT_GATES, needs_logits
from lpconv.machine import out_of_memory
from lpconv.progress import Progress
from lpconv.results import (
    LogitsCheck,
    TensorRecord,
    VerifyResult,
    WeightsCheck,
)

__all__ = ["verify_written"]


def verify_written(job: Job, directory: Path, tensors: Sequence[TensorRecord], progress: Progress) -> VerifyResult:
    """Check the files in `directory` as the job's options ask, and its gates."""
    level = job.plan.options.verify
    if level == "none" and not job.gates:
        return VerifyResult(level="none", passed=True)
    progress.start("verifying", 0)
    residuals = find_residual(directory)
    with OutputReader(directory, tensors, residuals) as output, SingleThreadedTorch():  # pieces too small to share
        count, mismatched = check_samples(job.source, output)
    weights = _weights_check(tensors, count, mismatched)
    problems = [f"tensor `{n}` does not decode to what it should" for n in mismatched]
    logits = _logits(job, directory, level) if level in ("logits", "auto") or needs_logits(job.gates) else None
    if logits is not None and logits.bit_equal is False and _is_exact(tensors):
        problems.append(f"the weights are exact, yet outputs differ by {logits.max_abs_diff:g}")
    ran = logits is not None and logits.skipped is None
    result = VerifyResult(
        level="logits" if ran else "weights",
        passed=not problems,
        weights=weights,
        logits=logits,
        problems=tuple(problems),
    )
    gates = CONVERT_GATES.check(job.gates, result)
    return dataclasses.replace(result, gates=gates, passed=result.passed and all(g.passed for g in gates))


def _is_exact(tensors: Sequence[TensorRecord]) -> bool:
    return all(t.max_rel_error == 0 for t in tensors if t.action == "convert")


def _weights_check(tensors: Sequence[TensorRecord], count: int, mismatched: tuple[str, ...]) -> WeightsCheck:
    converted = [t for t in tensors if t.action == "convert"]
    worst = min(converted, key=lambda t: t.sqnr_db if t.sqnr_db is not None else float("inf"), default=None)
    sqnr = worst.sqnr_db if worst is not None and worst.sqnr_db is not None else float("inf")
    return WeightsCheck(
        max_rel_error=max((t.max_rel_error or 0.0 for t in converted), default=0.0),
        min_sqnr_db=sqnr,
        worst=worst.name if worst is not None and sqnr != float("inf") else None,
        num_tensors=len(converted),
        num_elements_checked=count,
        mismatched=mismatched,
    )


def _logits(job: Job, directory: Path, level: str) -> LogitsCheck:
    """Run both models, or say why not. What was asked for explicitly must run; `auto` may skip."""
    automatic = level == "auto" and not needs_logits(job.gates)
    skip = job.memory.no_logits if automatic else None
    if skip is not None:
        return LogitsCheck(skipped=skip)
    from lpconv.convert.logits import check_logits, check_model  # transformers takes seconds to import

    try:
        check_model(job.contents, sum(t.info.num_elements for t in job.plan.tensors))
    except LpconvError as e:
        if not automatic:
            raise
        return LogitsCheck(skipped=e.message)
    try:
        return check_logits(
            job.resolved.directory,
            directory,
            trust_remote_code=job.plan.options.trust_remote_code,
        )
    except UnsupportedError as e:
        if not automatic:
            raise
        return LogitsCheck(skipped=e.message)
    except LpconvError:
        raise
    except Exception as e:  # transformers raises anything at all for checkpoints it does not know
        text = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        if not automatic:
            unsupported = UnsupportedError(f"the model could not be run: {text}", hint="use --verify weights")
            raise out_of_memory(e) or unsupported from e
        return LogitsCheck(skipped=f"the model could not be run: {text}")
