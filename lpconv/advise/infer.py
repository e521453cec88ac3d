"""Conversions tried on a model until the smallest that keeps the quality is known.

A sample of each tensor's rows gives noise over signal and the plan gives the size: what is larger and noisier than
another is pruned, so that of the rest the larger has less noise. They are encoded in memory, and the model is run with
what they decode to, beside itself on the same windows of text; so the gap is a mean of paired differences. The first is
the smallest with little noise. Where it keeps the quality the next smaller one follows, until one surely does not keep
it, or has so much more noise that it cannot; else larger ones, until one does. What is left is larger than the answer,
or noisier than what did not keep the quality. One whose interval leaves that open rules out nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lpconv.advise.candidates import Conversion, conversions, convert_options
from lpconv.advise.subject import Deadline, Subject
from lpconv.advise.train import estimate_mean
from lpconv.convert.preview import decoded_tensors, noise_of_sample
from lpconv.errors import LpconvError, finding
from lpconv.models.inputs import example_inputs
from lpconv.plan.job import Job, prepare
from lpconv.plan.settings import fill_options
from lpconv.progress import Progress
from lpconv.results import AdviceRow, GapEstimate, TensorRecord
from lpconv.verify.logits import compare, outputs_of

_SAMPLE = 2**13  # elements of a tensor
# After 8, 16, 32 and 64 windows an interval is looked at, and is the last if it says whether the quality is kept. That
# is four chances to be wrong: at 1 % each and 2 % in the end, what is told holds in 95 % of cases (Bonferroni).
_FIRST_LOOK = 8
_EARLY, _LAST = 0.99, 0.98
_SHARE = 1 / 3  # of the time that is left, for the windows of one candidate: what is left then is enough for another
_SAME_SIZE, _SAME_NOISE = 1.01, 10**0.1  # 1 % of the size, 1 dB
_LITTLE_NOISE = 1e-3  # of the signal: 30 dB, as e4m3fn has
_DOUBT = 4.0  # by which a gap that noise foretells must exceed the quality to be ruled out


@contextmanager
def job_of(subject: Subject, conversion: Conversion) -> Iterator[Job]:
    """A conversion understood and not begun, its source open."""
    options = fill_options(convert_options(conversion.settings, revision=subject.revision, verify="none"))
    job = prepare(subject.prepared.checkpoint, Path(conversion.name), options, headers_only=True)
    try:
        yield job
    finally:
        job.source.close()


def open_converted(
    subject: Subject, conversion: Conversion, progress: Progress
) -> tuple[Any, tuple[TensorRecord, ...]]:
    """The model as opening the output of a conversion would give it, and what happened to each tensor."""
    with job_of(subject, conversion) as job:
        state, records = decoded_tensors(job, progress)
    return subject.with_tensors(state), records


class Conversions:
    """The conversions of one advice. `told` hears of each row as it becomes known."""

    def __init__(
        self, subject: Subject, *, quality: float, told: Callable[[AdviceRow], object], progress: Progress
    ) -> None:
        self._subject, self._quality, self._told, self._progress = subject, quality, told, progress
        self._own: list[Any] = []  # figures of the model itself, window by window

    def run(self, deadline: Deadline) -> None:
        """Look at all, and measure until the answer is known: one in any case, more until there is no time."""
        front = [row for row in self._screened() if row.status == "unmeasured"]
        is_little = [row.noise is not None and row.noise <= _LITTLE_NOISE for row in front]
        start = is_little.index(True) if any(is_little) else len(front) - 1
        smaller, larger = front[:start], front[start:]
        kept = missed = False
        taken_s = -math.inf  # by the last
        while not (kept and missed) and (left := smaller if kept else larger) and taken_s <= deadline.left_s:
            before_s = deadline.left_s
            row = self._measured(left.pop(-1 if kept else 0), deadline.part(_SHARE))
            taken_s = before_s - deadline.left_s
            if row.gap is not None and row.gap.high <= self._quality:
                self._rule_out(larger, f"larger than {row.name}, which keeps the quality")
                kept = True
            if row.gap is not None and row.gap.low > self._quality:
                self._rule_out(smaller, f"noisier than {row.name}, which does not keep the quality")
                missed = True
            elif smaller and least_gap(smaller[-1], row, self._subject.metric) > _DOUBT * self._quality:
                self._rule_out(smaller, f"far noisier than {row.name}, whose gap would grow beyond the quality")
                missed = True
            self._told(row)

    def measure(self, conversion: Conversion, deadline: Deadline) -> None:
        """One more, whatever it takes."""
        row = self._sampled(conversion)
        self._told(row if row.status == "failed" else self._measured(row, deadline))

    def _rule_out(self, rows: list[AdviceRow], why: str) -> None:
        """What need not be measured any more."""
        for row in rows:
            self._told(replace(row, status="pruned", why=why))
        rows.clear()

    def _screened(self) -> list[AdviceRow]:
        """Every conversion with its size and the noise of a sample, the smallest first, the beaten ones pruned."""
        candidates = conversions()
        self._progress.start("sampling weights", len(candidates), unit="steps")
        found = []
        for conversion in candidates:
            found.append(self._sampled(conversion))
            self._progress.advance(1)
        rows = sorted(prune_rows(found), key=lambda row: row.size_bytes or math.inf)
        for row in rows:
            self._told(row)
        return rows

    def _sampled(self, conversion: Conversion) -> AdviceRow:
        row = AdviceRow(
            purpose="infer",
            name=conversion.name,
            settings=conversion.settings,
            status="unmeasured",
            why="no time was left to try it",
        )
        try:
            with job_of(self._subject, conversion) as job:
                return replace(row, size_bytes=job.plan.bytes_out, noise=noise_of_sample(job, elements=_SAMPLE))
        except LpconvError as e:
            return replace(row, status="failed", why=finding(e))

    def _measured(self, row: AdviceRow, deadline: Deadline) -> AdviceRow:
        subject = self._subject
        self._progress.start(f"trying {row.name}", 0)
        try:
            model, records = open_converted(subject, Conversion(name=row.name, settings=row.settings), self._progress)
            gap = self._estimated(model, deadline)
            if subject.metric == "output":
                gap = replace(gap, low=max(gap.low, 0.0))  # a relative error
            figures = self._figures(model)
        except LpconvError as e:
            return replace(row, status="failed", why=finding(e))
        if not math.isfinite(gap.value):
            return replace(row, status="failed", why="the model's outputs are not finite")
        sqnr = min((r.sqnr_db for r in records if r.action == "convert" and r.sqnr_db is not None), default=None)
        return replace(row, status="measured", why="", gap=gap, sqnr_db=sqnr, figures=figures)

    def _estimated(self, model: Any, deadline: Deadline) -> GapEstimate:
        """The gap on a few windows, then on twice as many, until its interval says whether the quality is kept."""
        subject, gaps = self._subject, list[float]()
        while True:
            first, count = len(gaps), min(len(subject.windows), 2 * len(gaps) or _FIRST_LOOK)
            self._own += subject.figures(subject.model, subject.windows[len(self._own) : count])
            gaps += subject.gaps(self._own[first:count], subject.figures(model, subject.windows[first:count]))
            is_last = count == len(subject.windows)
            found = estimate_mean(gaps, _LAST if is_last else _EARLY)
            is_known = found.high <= self._quality or found.low > self._quality or not math.isfinite(found.value)
            if is_last or is_known or deadline.left_s <= 0:
                return found

    def _figures(self, model: Any) -> dict[str, float]:
        """What the gates of `convert --verify logits` will meet."""
        inputs = example_inputs(self._subject.model)
        with torch.inference_mode():
            check = compare(outputs_of(self._subject.model, inputs), outputs_of(model, inputs), "", "")
        name, value = ("kl", check.mean_kl) if self._subject.metric == "loss" else ("logits_rel_error", check.rel_error)
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
