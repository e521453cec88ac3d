"""Try conversions of a model until the smallest one that keeps the quality is known.

A sample of each tensor's rows gives the noise-to-signal ratio and the plan gives the size. A conversion that is larger
and noisier than another is pruned, so among the rest the larger ones have less noise. A trial encodes in memory and
runs the model with the decoded weights and with its own on the same windows of text, so the gap is a mean of paired
differences. The first trial is the smallest conversion with little noise. If it keeps the quality, smaller ones follow
until one certainly does not keep it, or has so much more noise that it cannot; otherwise larger ones follow until one
keeps it. All others are larger than the answer, or noisier than a conversion that failed. A conversion whose interval
leaves this open rules out nothing.

Error feedback keeps the size but takes minutes, and its noise in the weights is larger by design. So it is tried last,
on the conversions smaller than the answer, the largest first, until one does not keep the quality.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lpconv.advise.candidates import Settings, conversions, describe_conversion, judge_row, with_feedback
from lpconv.advise.options import Budget
from lpconv.advise.subject import Subject, job_of, open_converted
from lpconv.bench.models import gemms_of, running_bytes
from lpconv.bench.options import PLAIN, Case
from lpconv.bench.roofline import peaks_in, step_gemm_seconds
from lpconv.convert.apply import noise_of_sample
from lpconv.errors import LpconvError, problem_text
from lpconv.models.inputs import vocabulary_size
from lpconv.progress import Deadline, Progress, TimeIsUp
from lpconv.results import AdviceRow, GapEstimate, PeakRecord
from lpconv.student import estimate_mean
from lpconv.verify.outputs import compare_outputs, outputs_of, verification_inputs

_SAMPLE = 2**13  # elements per tensor
# The interval is examined after 8, 16, 32 and 64 windows, and measuring stops once it decides whether the quality is
# kept. With error probabilities of 1 % each and 2 % at the end, the decision is right in 95 % of cases (Bonferroni).
_FIRST_LOOK = 8
_EARLY, _LAST = 0.99, 0.98
_SHARE = 1 / 3  # share of the remaining time for the windows of one candidate; the rest is enough for another
_SAME_SIZE, _SAME_NOISE = 1.01, 10**0.1  # 1 % of the size, 1 dB
_LITTLE_NOISE = 1e-3  # relative to the signal: 30 dB, as for e4m3fn
_DOUBT = 4.0  # factor by which a gap estimated from noise must exceed the quality to be ruled out
_NARROW = ("bf16", "fp16", "e4m3fn", "e5m2", "int4", "int8", "e2m1")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Setup of a trial: the model, the budget, and forecasts by the format in which a model is opened.

    `text` is what error feedback is calibrated on, as in `convert --calibrate`.
    """

    subject: Subject
    budget: Budget
    forecasts: dict[str, dict[str, Any]]
    progress: Progress
    text: str = "demo"


def measure_conversions(trial: Trial, deadline: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """Yield all conversions, then updated rows, as far as time allows."""
    rows = _screen(trial, deadline.part(_SHARE))
    yield rows
    quality = trial.budget.quality
    front = [row for row in rows if row.status == "unmeasured" and row.size_bytes is not None]
    is_little = [row.noise is not None and row.noise <= _LITTLE_NOISE for row in front]
    start = is_little.index(True) if any(is_little) else len(front) - 1
    smaller, larger = front[:start], front[start:]
    kept = missed = False
    answer_bytes = math.inf
    last_s = 0.0  # seconds of the last trial
    while not (kept and missed) and (waiting := smaller if kept else larger) and last_s <= deadline.left_s:
        limit = deadline.part(_SHARE)
        row = measure(trial, waiting.pop(-1 if kept else 0), limit)
        last_s = limit.spent_s
        known = [row]
        if row.gap is not None and row.gap.high <= quality:
            known += _ruled_out(larger, f"larger than {row.name}, which is good enough")
            kept, answer_bytes = True, row.size_bytes or math.inf
        if row.gap is not None and row.gap.low > quality:
            known += _ruled_out(smaller, f"noisier than {row.name}, which is not good enough")
            missed = True
        elif smaller and least_gap(smaller[-1], row, trial.subject.metric) > _DOUBT * quality:
            known += _ruled_out(smaller, f"much noisier than {row.name}, so its gap would exceed the limit")
            missed = True
        yield known
    yield from _measure_feedback(trial, [r for r in front if (r.size_bytes or math.inf) < answer_bytes], deadline)


def _measure_feedback(trial: Trial, rows: Sequence[AdviceRow], deadline: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """Yield `rows`, smallest first, with error feedback instead of rounding to nearest, as far as there is time."""
    waiting = []
    for row in rows:
        settings = with_feedback(row.settings, trial.text)
        if settings is not None:
            why = "it needs calibration, and there was no time left to try it"
            name = describe_conversion(settings)
            waiting.append(replace(row, name=name, settings=settings, status="unmeasured", noise=None, why=why))
    yield waiting
    last_s = 0.0
    while waiting and last_s < deadline.left_s:
        limit = deadline.part(_SHARE)
        row = measure(trial, waiting.pop(), limit)
        last_s = limit.spent_s
        is_over = row.gap is None or row.gap.low > trial.budget.quality
        yield [row, *(_ruled_out(waiting, f"smaller than {row.name}, which is not good enough") if is_over else [])]


def measure_conversion(trial: Trial, name: str, settings: Settings, deadline: Deadline) -> AdviceRow:
    """Measure one conversion as far as time allows."""
    row = _sample_row(trial, name, settings, deadline)
    return row if row.status == "failed" else measure(trial, row, deadline)


def _ruled_out(rows: list[AdviceRow], why: str) -> list[AdviceRow]:
    """Mark all `rows` as pruned, and empty the list."""
    pruned = [replace(row, status="pruned", why=why) for row in rows]
    rows.clear()
    return pruned


def _screen(trial: Trial, deadline: Deadline) -> list[AdviceRow]:
    """Every conversion with its size and sampled noise if time allows, smallest first, with dominated ones pruned."""
    candidates, rows = conversions(), []
    trial.progress.start("sampling weights", len(candidates), unit="steps")
    for name, settings in candidates.items():
        rows.append(_sample_row(trial, name, settings, deadline))
        trial.progress.advance(1)
    return sorted(prune_rows(rows), key=lambda row: row.size_bytes or math.inf)


def _sample_row(trial: Trial, name: str, settings: Settings, deadline: Deadline) -> AdviceRow:
    """A conversion with its size, sampled noise, and a forecast of its memory and time, unless the deadline passed."""
    why = "there was no time left to try it"
    row = AdviceRow(purpose="infer", name=name, settings=settings, status="unmeasured", why=why)
    if deadline.left_s <= 0:
        return row
    try:
        with job_of(trial.subject, settings) as job:
            row = replace(row, size_bytes=job.plan.bytes_out, noise=noise_of_sample(job, elements=_SAMPLE))
    except LpconvError as e:
        return replace(row, status="failed", why=problem_text(e))
    return replace(row, **trial.forecasts[opened_in(settings)])


def measure(trial: Trial, row: AdviceRow, deadline: Deadline) -> AdviceRow:
    """Measure the gap of a sampled row and check it against the budget; windows are run as time allows."""
    subject = trial.subject
    start_s = deadline.spent_s
    try:
        trial.progress.start(f"trying {row.name}", 0)
        model, records = open_converted(subject, row.settings, trial.progress)
        calibration_s = deadline.spent_s - start_s if "rounding" in row.settings else None
        gap = _gap(trial, model, deadline)
        if subject.metric == "output":
            gap = replace(gap, low=max(gap.low, 0.0))  # relative errors are not negative
        figures = _figures(subject, model)
    except LpconvError as e:
        return replace(row, status="failed", why=problem_text(e))
    except TimeIsUp:
        return row
    if not math.isfinite(gap.value):
        return replace(row, status="failed", why="the model's outputs are not finite")
    sqnr = min((r.sqnr_db for r in records if r.action == "convert" and r.sqnr_db is not None), default=None)
    known = replace(row, status="measured", why="", gap=gap, sqnr_db=sqnr, figures=figures, calibration_s=calibration_s)
    return judge_row(known, trial.budget)


def _gap(trial: Trial, model: Any, deadline: Deadline) -> GapEstimate:
    """The gap on a few windows, then on twice as many, until its interval decides whether the quality is kept."""
    subject, quality, gaps = trial.subject, trial.budget.quality, list[float]()
    while True:
        count = min(len(subject.windows), 2 * len(gaps) or _FIRST_LOOK)
        for n in range(len(gaps), count):
            trial.progress.advance(0)  # between windows, because each may take seconds
            gaps.append(subject.gap(model, n))
        is_last = count == len(subject.windows)
        gap = estimate_mean(gaps, _LAST if is_last else _EARLY)
        is_known = gap.high <= quality or gap.low > quality or not math.isfinite(gap.value)
        if is_last or is_known or deadline.left_s <= 0:
            return gap


def _figures(subject: Subject, model: Any) -> dict[str, float]:
    """The metrics that the gates of `convert --verify logits` will check."""
    inputs = verification_inputs(subject.model, subject.prepared.checkpoint.directory).tensors
    with torch.inference_mode():
        check = compare_outputs(outputs_of(subject.model, inputs), outputs_of(model, inputs))
    name, value = ("kl", check.mean_kl) if subject.metric == "loss" else ("logits_rel_error", check.rel_error)
    return {} if value is None else {name: value}


def least_gap(row: AdviceRow, measured: AdviceRow, metric: str) -> float:
    """The smallest gap to expect of a conversion, given another one that was measured.

    Small noise in the weights changes outputs in proportion to its square root, and the loss of a trained model, whose
    gradient is small, in proportion to the noise itself.
    """
    if row.noise is None or not measured.noise or measured.gap is None:
        return 0.0
    growth = row.noise / measured.noise
    return measured.gap.low * (math.sqrt(growth) if metric == "output" else growth)


def prune_rows(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """The rows, with those pruned that another one beats in size and noise, or equals and precedes."""
    pruned: list[AdviceRow] = []
    for row in rows:
        better = next((r.name for r in rows if _no_worse(r, row) and not _no_worse(row, r)), None)
        alike = next((r.name for r in pruned if r.status != "pruned" and _no_worse(r, row)), None)
        why = f"beaten by {better}" if better else f"no better than {alike}" if alike else ""
        pruned.append(replace(row, status="pruned", why=f"{why} in size and weights") if why else row)
    return pruned


def _no_worse(row: AdviceRow, than: AdviceRow) -> bool:
    if row.size_bytes is None or row.noise is None or than.size_bytes is None or than.noise is None:
        return False
    return row.size_bytes <= than.size_bytes * _SAME_SIZE and row.noise <= than.noise * _SAME_NOISE


def opened_in(settings: Mapping[str, Any]) -> str:
    """The format in which a conversion opens: bf16, or fp32 if its weights have more than 16 bits."""
    return "bf16" if str(settings["format"]) in _NARROW and "residual" not in settings else "fp32"


def forecast(subject: Subject, batch_size: int, peaks: PeakRecord, *, opened: str) -> dict[str, Any]:
    """Estimated fields of an `AdviceRow`: memory and time of a step of a model opened in bf16 or fp32."""
    model, seq_len = subject.model, subject.prepared.seq_len
    case = Case(
        model="", layers=None, format=opened, method=PLAIN, mode="infer", optimizer=None, seq=seq_len,
        batch=batch_size, compiled="off", device="cpu",
    )  # fmt: skip
    gemms, m = gemms_of(model), batch_size * seq_len
    return {
        "memory_bytes": running_bytes(model, case, vocabulary_size(model.config)),
        "memory_from": f"estimate, opened in {'fp32' if opened == 'fp32' else '16 bits'}",
        "step_time_s": step_gemm_seconds(gemms, m, peaks_in(opened, peaks), method=None, train=False),
        "time_from": "roofline of its Linear layers, from measured peaks",
    }
