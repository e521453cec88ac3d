"""Conversions tried on a model until the smallest that keeps the quality is known.

A sample of each tensor's rows gives noise over signal and the plan gives the size: a conversion that is larger and
noisier than another is pruned, so that of the remaining ones the larger has less noise. They are encoded in memory, and
the model is run with the decoded weights, next to itself on the same windows of text; so the gap is a mean of paired
differences. The first is the smallest with little noise. If it keeps the quality the next smaller one follows, until
one surely does not keep it, or has so much more noise that it cannot; else larger ones, until one does. The others are
larger than the answer, or noisier than a conversion that did not keep the quality. One whose interval leaves that open
rules out nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lpconv.advise.candidates import Settings, conversions
from lpconv.advise.choice import estimate_mean, judged
from lpconv.advise.forecast import opened_in
from lpconv.advise.options import Budget
from lpconv.advise.subject import Deadline, Subject, job_of, open_converted
from lpconv.convert.preview import noise_of_sample
from lpconv.errors import LpconvError, problem_text
from lpconv.models.inputs import example_inputs
from lpconv.progress import Progress
from lpconv.results import AdviceRow, GapEstimate
from lpconv.verify.logits import compare, outputs_of

_SAMPLE = 2**13  # elements of a tensor
# After 8, 16, 32 and 64 windows an interval is looked at, and is the last if it says whether the quality is kept. That
# is four chances to be wrong: at 1 % each and 2 % in the end, what is told holds in 95 % of cases (Bonferroni).
_FIRST_LOOK = 8
_EARLY, _LAST = 0.99, 0.98
_SHARE = 1 / 3  # of the time that is left, for the windows of one candidate: the remainder is enough for another
_SAME_SIZE, _SAME_NOISE = 1.01, 10**0.1  # 1 % of the size, 1 dB
_LITTLE_NOISE = 1e-3  # of the signal: 30 dB, as e4m3fn has
_DOUBT = 4.0  # factor by which a gap estimated from noise must exceed the quality to be ruled out


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What conversions are tried on: a model, the budget, and forecasts by the format that a model is opened in."""

    subject: Subject
    budget: Budget
    forecasts: dict[str, dict[str, Any]]
    progress: Progress


def measure_conversions(trial: Trial, deadline: Deadline) -> Iterator[Sequence[AdviceRow]]:
    """All conversions, and again those that are known better; one is measured in any case, more while there is time."""
    rows = _screened(trial)
    yield rows
    quality = trial.budget.quality
    front = [row for row in rows if row.status == "unmeasured"]
    is_little = [row.noise is not None and row.noise <= _LITTLE_NOISE for row in front]
    start = is_little.index(True) if any(is_little) else len(front) - 1
    smaller, larger = front[:start], front[start:]
    kept = missed = False
    last_s = -math.inf  # seconds that the last one took
    while not (kept and missed) and (waiting := smaller if kept else larger) and last_s <= deadline.left_s:
        limit = deadline.part(_SHARE)
        row = measure(trial, waiting.pop(-1 if kept else 0), limit)
        last_s = limit.spent_s
        known = [row]
        if row.gap is not None and row.gap.high <= quality:
            known += _ruled_out(larger, f"larger than {row.name}, which keeps the quality")
            kept = True
        if row.gap is not None and row.gap.low > quality:
            known += _ruled_out(smaller, f"noisier than {row.name}, which does not keep the quality")
            missed = True
        elif smaller and least_gap(smaller[-1], row, trial.subject.metric) > _DOUBT * quality:
            known += _ruled_out(smaller, f"far noisier than {row.name}, whose gap would grow beyond the quality")
            missed = True
        yield known


def measure_conversion(trial: Trial, name: str, settings: Settings, deadline: Deadline) -> AdviceRow:
    """One conversion measured, whatever it takes."""
    row = _sampled(trial, name, settings)
    return row if row.status == "failed" else measure(trial, row, deadline)


def _ruled_out(rows: list[AdviceRow], why: str) -> list[AdviceRow]:
    """The rows, which need not be measured any more and are taken off the list."""
    pruned = [replace(row, status="pruned", why=why) for row in rows]
    rows.clear()
    return pruned


def _screened(trial: Trial) -> list[AdviceRow]:
    """Every conversion with its size and the noise of a sample, the smallest first, the beaten ones pruned."""
    candidates, found = conversions(), []
    trial.progress.start("sampling weights", len(candidates), unit="steps")
    for name, settings in candidates.items():
        found.append(_sampled(trial, name, settings))
        trial.progress.advance(1)
    return sorted(prune_rows(found), key=lambda row: row.size_bytes or math.inf)


def _sampled(trial: Trial, name: str, settings: Settings) -> AdviceRow:
    """A conversion with its size, the noise of a sample, and a forecast of what running it takes."""
    why = "no time was left to try it"
    row = AdviceRow(purpose="infer", name=name, settings=settings, status="unmeasured", why=why)
    try:
        with job_of(trial.subject, settings) as job:
            row = replace(row, size_bytes=job.plan.bytes_out, noise=noise_of_sample(job, elements=_SAMPLE))
    except LpconvError as e:
        return replace(row, status="failed", why=problem_text(e))
    return replace(row, **trial.forecasts[opened_in(settings)])


def measure(trial: Trial, row: AdviceRow, deadline: Deadline) -> AdviceRow:
    """A sampled row with the gap of the converted model, judged; windows are run while there is time."""
    subject = trial.subject
    trial.progress.start(f"trying {row.name}", 0)
    try:
        model, records = open_converted(subject, row.settings, trial.progress)
        gap = _gap(subject, model, trial.budget.quality, deadline)
        if subject.metric == "output":
            gap = replace(gap, low=max(gap.low, 0.0))  # a relative error
        figures = _figures(subject, model)
    except LpconvError as e:
        return replace(row, status="failed", why=problem_text(e))
    if not math.isfinite(gap.value):
        return replace(row, status="failed", why="the model's outputs are not finite")
    sqnr = min((r.sqnr_db for r in records if r.action == "convert" and r.sqnr_db is not None), default=None)
    return judged(replace(row, status="measured", why="", gap=gap, sqnr_db=sqnr, figures=figures), trial.budget)


def _gap(subject: Subject, model: Any, quality: float, deadline: Deadline) -> GapEstimate:
    """The gap on a few windows, then on twice as many, until its interval says whether the quality is kept."""
    gaps: list[float] = []
    while True:
        first, count = len(gaps), min(len(subject.windows), 2 * len(gaps) or _FIRST_LOOK)
        gaps += subject.gaps(subject.own_figures(count)[first:], subject.figures(model, subject.windows[first:count]))
        is_last = count == len(subject.windows)
        found = estimate_mean(gaps, _LAST if is_last else _EARLY)
        is_known = found.high <= quality or found.low > quality or not math.isfinite(found.value)
        if is_last or is_known or deadline.left_s <= 0:
            return found


def _figures(subject: Subject, model: Any) -> dict[str, float]:
    """The figures that the gates of `convert --verify logits` will meet."""
    inputs = example_inputs(subject.model)
    with torch.inference_mode():
        check = compare(outputs_of(subject.model, inputs), outputs_of(model, inputs), "", "")
    name, value = ("kl", check.mean_kl) if subject.metric == "loss" else ("logits_rel_error", check.rel_error)
    return {} if value is None else {name: value}


def least_gap(row: AdviceRow, measured: AdviceRow, metric: str) -> float:
    """The least gap that a conversion should have, from another that was measured.

    Small noise of weights changes outputs in proportion to its root, and the loss of a trained model, whose gradient
    is small, in proportion to itself.
    """
    if row.noise is None or not measured.noise or measured.gap is None:
        return 0.0
    growth = row.noise / measured.noise
    return measured.gap.low * (math.sqrt(growth) if metric == "output" else growth)


def prune_rows(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """The rows, pruned where another one is as good in size and noise and better in either, or alike and before it."""
    found: list[AdviceRow] = []
    for row in rows:
        better = next((r.name for r in rows if _no_worse(r, row) and not _no_worse(row, r)), None)
        alike = next((r.name for r in found if r.status != "pruned" and _no_worse(r, row)), None)
        why = f"beaten by {better}" if better else f"no better than {alike}" if alike else ""
        found.append(replace(row, status="pruned", why=f"{why} in size and weights") if why else row)
    return found


def _no_worse(row: AdviceRow, than: AdviceRow) -> bool:
    if row.size_bytes is None or row.noise is None or than.size_bytes is None or than.noise is None:
        return False
    return row.size_bytes <= than.size_bytes * _SAME_SIZE and row.noise <= than.noise * _SAME_NOISE
