"""Try conversions of a model until the smallest one that keeps the quality is known.

A sample of each tensor's rows gives the noise-to-signal ratio and the plan gives the size. A conversion that is larger
and noisier than another is pruned, so among the rest the larger ones have less noise. A trial encodes in memory and
runs the model with the decoded weights and with its own on the same windows of text, so the gap is a mean of paired
differences. The first trial is the smallest conversion with little noise. Until one keeps the quality, larger ones with
clearly less noise follow; then smaller ones, the largest first. A conversion that certainly does not keep the quality
rules out the noisier ones, also those that have so much more noise than the last that they cannot keep it. One whose
interval leaves this open rules out nothing.

Error feedback keeps the size but takes minutes, and its noise in the weights is larger by design. So it is tried last,
on the conversions smaller than the answer, the largest first, until one does not keep the quality.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lpconv.advise.candidates import Settings, conversions, describe_conversion, judge_row, number_of, with_feedback
from lpconv.advise.options import Budget
from lpconv.advise.subject import Subject, job_of, open_converted, roundings_of
from lpconv.bench.models import gemms_of, running_bytes
from lpconv.bench.options import PLAIN, Case
from lpconv.bench.roofline import peaks_in, step_gemm_seconds
from lpconv.convert.apply import noise_of_sample
from lpconv.errors import LpconvError, problem_text
from lpconv.models.inputs import vocabulary_size
from lpconv.progress import Deadline, Progress, TimeIsUp, counted
from lpconv.report.advise import NOT_SMALLER
from lpconv.results import AdviceRow, GapEstimate, PeakRecord
from lpconv.student import estimate_mean
from lpconv.verify.outputs import compare_outputs, outputs_of, verification_inputs

NO_TIME = "there was no time left to try it"
_SAMPLE = 2**13  # elements per tensor
# The interval is examined after 8, 16, 32 and 64 windows, and measuring stops once it decides whether the quality is
# kept. With error probabilities of 1 % each and 2 % at the end, the decision is right in 95 % of cases (Bonferroni).
_LOOKS = (8, 16, 32, 64)
_EARLY, _LAST = 0.99, 0.98
_SHARE = 1 / 2  # share of the remaining time for the sample, and for each candidate until one is good enough
_SAME_SIZE, _SAME_NOISE = 1.01, 10**0.1  # 1 % of the size, 1 dB
_LITTLE_NOISE = 1e-3  # relative to the signal: 30 dB, as for e4m3fn
_LESS = 20.0  # factor by which the noise of the next larger candidate is smaller (13 dB), if there is one
_DOUBT = 4.0  # factor by which a gap estimated from noise must exceed the quality to be ruled out


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Setup of a trial: the model, the budget, and forecasts by the format in which a model is opened.

    `text` is what error feedback is calibrated on, as in `convert --calibrate`. `costs_s` are the seconds that finished
    trials took to open a conversion and to run a window.
    """

    subject: Subject
    budget: Budget
    forecasts: dict[str, dict[str, Any]]
    progress: Progress
    text: str = "demo"
    runtime: str | None = None
    costs_s: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds_for_a_look(self) -> float:
        """Time for opening another conversion and a first look at it, judged by the last one; 0 before the first."""
        opened_s, window_s = self.costs_s[-1] if self.costs_s else (0.0, 0.0)
        return opened_s + _LOOKS[0] * window_s


def measure_conversions(trial: Trial, deadline: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """Yield all conversions, then updated rows, as far as time allows."""
    rows = _screen(trial, deadline.part(_SHARE))
    yield rows
    waiting = [row for row in rows if row.status == "unmeasured" and row.size_bytes is not None]
    last, answer = None, None
    while (row := _next_to_try(waiting, last, answer)) is not None and trial.seconds_for_a_look < deadline.left_s:
        waiting.remove(row)
        last = measure(trial, row, deadline.part(_SHARE) if answer is None else deadline)
        yield [last, *(known := _ruled_out(waiting, last, trial))]
        waiting = [r for r in waiting if r.name not in {k.name for k in known}]
        answer = last if _keeps_quality(last, trial) else answer  # after the first one only smaller ones are tried
    yield [replace(row, seconds=trial.seconds_for_a_look) for row in waiting]
    smaller = [r for r in rows if r.status == "unmeasured" and _size(r) < _size(answer)]
    yield from measure_feedback(trial, smaller, deadline)


def _size(row: AdviceRow | None) -> float:
    return math.inf if row is None or row.size_bytes is None else row.size_bytes


def _keeps_quality(row: AdviceRow, trial: Trial) -> bool:
    return row.gap is not None and row.gap.high <= trial.budget.quality


def _next_to_try(waiting: Sequence[AdviceRow], last: AdviceRow | None, answer: AdviceRow | None) -> AdviceRow | None:
    """The conversion to try next, of those that are `waiting`, smallest first; None if none could be better.

    First the smallest with little noise. Until one is good enough, a larger one with clearly less noise than the last;
    afterwards the largest that is smaller than the answer.
    """
    if answer is not None:
        return next((row for row in reversed(waiting) if _size(row) < _size(answer)), None)
    if last is None:
        return next((r for r in waiting if r.noise is not None and r.noise <= _LITTLE_NOISE), [None, *waiting][-1])
    larger = [row for row in waiting if _size(row) > _size(last)]
    most = (last.noise or 0.0) / _LESS
    return next((r for r in larger if r.noise is not None and r.noise <= most), [None, *larger][-1])


def _ruled_out(waiting: Sequence[AdviceRow], row: AdviceRow, trial: Trial) -> list[AdviceRow]:
    """The waiting rows that cannot be the answer after `row` was measured, with the reason."""
    quality, known = trial.budget.quality, list[AdviceRow]()
    for other in waiting:
        why = ""
        if _keeps_quality(row, trial) and _size(other) > _size(row):
            why = f"larger than {row.name}, which is good enough"
        elif row.gap is not None and _size(other) < _size(row) and _no_finer_inputs(other, row):
            if row.gap.low > quality:
                why = f"noisier than {row.name}, which is not good enough"
            elif least_gap(other, row, trial.subject.metric) > _DOUBT * quality:
                why = f"much noisier than {row.name}, so its gap would exceed the limit"
        known += [replace(other, status="pruned", why=why)] if why else []
    return known


def measure_feedback(trial: Trial, rows: Sequence[AdviceRow], deadline: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """Yield `rows`, smallest first, with error feedback instead of rounding to nearest, as far as there is time."""
    waiting = []
    for row in rows:
        settings = with_feedback(row.settings, trial.text)
        if settings is not None:
            why = "it needs calibration, and there was no time left to try it"
            name = describe_conversion(settings)
            waiting.append(replace(row, name=name, settings=settings, status="unmeasured", noise=None, why=why))
    yield waiting
    while waiting and trial.seconds_for_a_look < deadline.left_s:
        limit = deadline.part(1.0)
        limit.fits = True  # the first layers tell whether the calibration fits into the time
        row = measure(replace(trial, progress=limit), waiting.pop(), deadline)
        over = row.gap is None or row.gap.low > trial.budget.quality
        why = f"smaller than {row.name}, which is not good enough"
        yield [row, *(replace(r, status="pruned", why=why) for r in waiting if over and row.status != "unmeasured")]
        waiting = [] if over else waiting


def measure_conversion(trial: Trial, name: str, settings: Settings, deadline: Deadline) -> AdviceRow:
    """Measure one conversion as far as time allows."""
    row = _sample_row(trial, name, settings, deadline)
    return measure(trial, row, deadline) if row.status == "unmeasured" else row


def _screen(trial: Trial, deadline: Deadline) -> list[AdviceRow]:
    """Every conversion with its size and sampled noise if time allows, smallest first, with dominated ones pruned."""
    candidates = counted(conversions(trial.runtime).items(), "sampling weights", "candidates", trial.progress)
    rows = [_sample_row(trial, name, settings, deadline) for name, settings in candidates]
    return sorted(prune_rows(rows), key=lambda row: row.size_bytes or math.inf)


def _sample_row(trial: Trial, name: str, settings: Settings, deadline: Deadline) -> AdviceRow:
    """A conversion with its size, sampled noise, and a forecast of its memory and time, unless the deadline passed."""
    row = AdviceRow(purpose="infer", name=name, settings=settings, status="unmeasured", why=NO_TIME)
    if deadline.left_s <= 0:
        return row
    try:
        with job_of(trial.subject, settings) as job:
            rounded = next((r.words for r in roundings_of(job).values()), None)
            noise = noise_of_sample(job, elements=_SAMPLE)
            row = replace(row, size_bytes=job.plan.bytes_out, noise=noise, rounded_inputs=rounded)
            if job.plan.bytes_out >= trial.subject.source_bytes:
                row = replace(row, status="pruned", why=NOT_SMALLER)
    except LpconvError as e:
        return replace(row, status="failed", why=problem_text(e))
    is_narrow = number_of(settings).storage_bits <= 16 and "residual" not in settings  # opens in 16 bits
    return replace(row, **trial.forecasts["bf16" if is_narrow else "fp32"])


def measure(trial: Trial, row: AdviceRow, deadline: Deadline) -> AdviceRow:
    """Measure the gap of a sampled row and check it against the budget; windows are run as time allows."""
    subject, started_s = trial.subject, deadline.spent_s
    try:
        model, records = open_converted(subject, row.settings, trial.progress, phase=f"encoding {row.name}")
        opened_s = deadline.spent_s - started_s
        gap = _gap(trial, row.name, model, deadline)
        trial.costs_s.append((opened_s, (deadline.spent_s - started_s - opened_s) / gap.count))
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
    known = replace(row, status="measured", why="", gap=gap, sqnr_db=sqnr, figures=figures)
    known = replace(known, seconds=deadline.spent_s - started_s)
    if "rounding" in row.settings:
        known = replace(known, calibration_s=opened_s)
    judged = judge_row(known, trial.budget)
    words = "good enough" if judged.meets else "not good enough" if gap.low > trial.budget.quality else "undecided"
    trial.progress.message(f"{row.name}: gap {gap.value:.4f} ({gap.low:.4f} to {gap.high:.4f}), {words}")
    return judged


def _gap(trial: Trial, name: str, model: Any, deadline: Deadline) -> GapEstimate:
    """The gap on a few windows, then on twice as many, until its interval decides or the time is up.

    Raises TimeIsUp if there was not even time for two windows.
    """
    subject, quality, gaps = trial.subject, trial.budget.quality, list[float]()
    with suppress(TimeIsUp):
        deadline.start(f"running {name}", len(subject.windows), unit="windows")
        while len(gaps) < len(subject.windows) and deadline.left_s > 0:
            gaps.append(subject.gap(model, len(gaps)))
            deadline.advance(1)
            gap = _estimate(gaps, subject) if len(gaps) in _LOOKS else None
            if gap is not None and (gap.high <= quality or gap.low > quality or not math.isfinite(gap.value)):
                return gap
    if len(gaps) < 2:
        raise TimeIsUp
    return _estimate(gaps, subject)


def _estimate(gaps: Sequence[float], subject: Subject) -> GapEstimate:
    return estimate_mean(gaps, _LAST if len(gaps) == len(subject.windows) else _EARLY)


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


def _no_finer_inputs(row: AdviceRow, than: AdviceRow) -> bool:
    """Whether `row` rounds inputs or `than` does not; otherwise its gap may be smaller despite noisier weights."""
    return row.rounded_inputs is not None or than.rounded_inputs is None


def _no_worse(row: AdviceRow, than: AdviceRow) -> bool:
    if row.size_bytes is None or row.noise is None or than.size_bytes is None or than.noise is None:
        return False
    is_no_larger = row.size_bytes <= than.size_bytes * _SAME_SIZE
    return is_no_larger and row.noise <= than.noise * _SAME_NOISE and _no_finer_inputs(than, row)


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
