"""Conversions tried on a model, the cheapest sufficient measurement first.

A sample of each tensor's rows gives noise over signal and the plan gives the size: what is larger and noisier than
another is pruned. The others are encoded in memory, and the model is run with what they decode to, beside itself on
the same windows of text; so the gap is a mean of paired differences. The smallest with little noise goes first, then
smaller ones as long as the budget of quality is met, else larger ones.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lpconv.advise.candidates import Conversion, conversions, convert_options
from lpconv.advise.interval import estimated
from lpconv.advise.subject import Subject
from lpconv.advise.time import Deadline
from lpconv.convert.job import Job, prepare
from lpconv.convert.logits import compare, outputs_of
from lpconv.convert.preview import decoded_tensors, noise_of_sample
from lpconv.errors import LpconvError, finding
from lpconv.models.inputs import example_inputs
from lpconv.progress import Progress
from lpconv.results import AdviceRow, TensorRecord

__all__ = ["Conversions", "converted", "job_of", "pruned"]

_SAMPLE = 2**13  # elements of a tensor
_FEW = 4  # windows of the first look
_SAME_SIZE, _SAME_NOISE = 1.01, 10**0.1  # 1 % of the size, 1 dB
_LITTLE_NOISE = 1e-3  # of the signal: 30 dB, as e4m3fn has


@contextmanager
def job_of(subject: Subject, conversion: Conversion) -> Iterator[Job]:
    """A conversion understood and not begun, its source open."""
    options = convert_options(conversion.settings, revision=subject.revision, verify="none")
    job = prepare(subject.name, Path(conversion.name), options, headers_only=True)
    try:
        yield job
    finally:
        job.source.close()


def converted(subject: Subject, conversion: Conversion, progress: Progress) -> tuple[Any, tuple[TensorRecord, ...]]:
    """The model as opening the output of a conversion would give it, and what happened to each tensor."""
    with job_of(subject, conversion) as job:
        state, records = decoded_tensors(job, progress)
    return subject.with_tensors(state), records


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A conversion and what is known of it; `seconds` is what encoding all of it should take."""

    conversion: Conversion
    row: AdviceRow
    seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        return self.row.size_bytes or 0


class Conversions:
    """The conversions of one advice. `told` hears of each row as it becomes known."""

    def __init__(
        self, subject: Subject, *, quality: float, told: Callable[[AdviceRow], None], progress: Progress
    ) -> None:
        self._subject, self._quality, self._told, self._progress = subject, quality, told, progress
        self._own: list[Any] = []  # figures of the model itself, window by window

    def run(self, deadline: Deadline) -> None:
        """Look at all, and measure those that no other one beats: one in any case, more until there is no time."""
        left = [c for c in self._screened() if c.row.status == "unmeasured"]
        last: AdviceRow | None = None
        while left:
            chosen = self._next(left, last)
            left.remove(chosen)
            if last is not None and chosen.seconds > deadline.left_s:
                continue
            last = self._measured(chosen, deadline.part(1 / (1 + len(left))))
            self._told(last)

    def measure(self, conversion: Conversion, deadline: Deadline) -> None:
        """One more, whatever it takes."""
        candidate = self._sampled(conversion)
        self._told(candidate.row if candidate.row.status == "failed" else self._measured(candidate, deadline))

    def _screened(self) -> list[_Candidate]:
        """Every conversion with its size and the noise of a sample, the beaten ones pruned."""
        candidates = conversions()
        self._progress.start("sampling weights", len(candidates), unit="steps")
        found = []
        for conversion in candidates:
            found.append(self._sampled(conversion))
            self._progress.advance(1)
        rows = pruned([c.row for c in found])
        screened = sorted((replace(c, row=row) for c, row in zip(found, rows, strict=True)), key=_size)
        for c in screened:
            self._told(c.row)
        return screened

    def _sampled(self, conversion: Conversion) -> _Candidate:
        row = AdviceRow(
            purpose="infer",
            name=conversion.name,
            settings=conversion.settings,
            status="unmeasured",
            why="no time was left to try it",
        )
        try:
            with job_of(self._subject, conversion) as job:
                started = time.perf_counter()
                noise, elements = noise_of_sample(job, elements=_SAMPLE)
                taken_s = time.perf_counter() - started
                total = sum(t.info.num_elements for t in job.plan.tensors if t.action == "convert")
                row = replace(row, size_bytes=job.plan.bytes_out, noise=noise)
                seconds = taken_s * total / max(elements, 1) / job.memory.workers
        except LpconvError as e:
            return _Candidate(conversion=conversion, row=replace(row, status="failed", why=finding(e)))
        return _Candidate(conversion=conversion, row=row, seconds=seconds)

    def _next(self, left: Sequence[_Candidate], last: AdviceRow | None) -> _Candidate:
        """Begin with the smallest of little noise; then the next smaller where the last met the quality, else a larger.

        `left` is sorted by size.
        """
        if last is None or last.gap is None or last.size_bytes is None:
            return next((c for c in left if c.row.noise is not None and c.row.noise <= _LITTLE_NOISE), left[-1])
        smaller = [c for c in left if c.size_bytes < (last.size_bytes or 0)]
        larger = [c for c in left if c not in smaller]
        return smaller[-1] if not larger or (smaller and last.gap.high <= self._quality) else larger[0]

    def _measured(self, candidate: _Candidate, deadline: Deadline) -> AdviceRow:
        subject, row = self._subject, candidate.row
        self._progress.start(f"trying {row.name}", 0)
        try:
            model, records = converted(subject, candidate.conversion, self._progress)
            gap = estimated(self._gaps(model, deadline))
            if subject.metric == "output":
                gap = replace(gap, low=max(gap.low, 0.0))  # a relative error
            figures = self._figures(model)
        except LpconvError as e:
            return replace(row, status="failed", why=finding(e))
        if not math.isfinite(gap.value):
            return replace(row, status="failed", why="the model's outputs are not finite")
        sqnr = min((r.sqnr_db for r in records if r.action == "convert" and r.sqnr_db is not None), default=None)
        return replace(row, status="measured", why="", gap=gap, sqnr_db=sqnr, figures=figures)

    def _gaps(self, model: Any, deadline: Deadline) -> list[float]:
        """The gaps of a few windows, then of more, until their interval is narrow beside the budget."""
        subject, gaps = self._subject, list[float]()
        while True:
            first, count = len(gaps), min(len(subject.windows), 2 * len(gaps) or _FEW)
            self._own += subject.figures(subject.model, subject.windows[len(self._own) : count])
            gaps += subject.gaps(self._own[first:count], subject.figures(model, subject.windows[first:count]))
            found = estimated(gaps)
            is_narrow = found.high - found.low <= self._quality / 2
            if count == len(subject.windows) or is_narrow or deadline.left_s <= 0 or not math.isfinite(found.value):
                return gaps

    def _figures(self, model: Any) -> dict[str, float]:
        """What the gates of `convert --verify logits` will meet."""
        inputs = example_inputs(self._subject.model)
        with torch.inference_mode():
            check = compare(outputs_of(self._subject.model, inputs), outputs_of(model, inputs), "", "")
        name, value = ("kl", check.mean_kl) if self._subject.metric == "loss" else ("logits_rel_error", check.rel_error)
        return {} if value is None else {name: value}


def _size(candidate: _Candidate) -> float:
    return candidate.row.size_bytes or math.inf


def pruned(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
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
