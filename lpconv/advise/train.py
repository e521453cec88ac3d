"""Recipes tried on a model: a few steps of the training beside the fp32 twin, on the same batches.

A pilot of the twin says what a step costs, and so how many steps a few recipes can have from three seeds within the
time. Those that keep least memory come first. Each trains from one seed; if that leaves hope for the quality, from two
more, whose spread says what a single run may differ by. The first that keeps the quality is the answer:
what is left keeps more memory.

A few steps do not show what the whole training will cost. The interval given is that of one new run at its end, and
three things widen it:

- *Seeds.* Runs of one recipe differ from seed to seed; one run alone says nothing about another.
- *Drift.* If the gap still changed in the second half of the steps, it may change as much with each doubling.
- *Lost updates.* A 16-bit optimizer that drops part of each intended update (1 - EDQ, arXiv 2405.03637 §4.2) may fall
  behind by that part of what the twin will still learn. It shows late, so that few steps do not measure it.
"""

import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from lpconv.advise.options import AdviseOptions
from lpconv.advise.subject import Deadline, Subject
from lpconv.errors import LpconvError, finding
from lpconv.progress import Progress, Silent
from lpconv.results import AdviceRow, GapEstimate, RunRecord
from lpconv.student import t_quantile
from lpconv.train.critical import with_critical
from lpconv.train.job import Work, training_job
from lpconv.train.memory import weight_bytes
from lpconv.train.one import train_one
from lpconv.train.recipes import RECIPES, TRAINING_OPTIMIZERS

_TWIN = "fp32"
_PILOT_STEPS = 6  # the least that times and measures memory
_MORE_SEEDS = 2
_PLANNED = 3  # recipes that there should be time for, from all seeds
_SLOWER = 2.0  # a step in low precision beside the twin's, where it is emulated
_TRAIN = "train"
_METRIC = "eval_loss"


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A finished run and what it took, its start included."""

    record: RunRecord
    seconds: float


class Trials:
    """The runs of one advice. Raises as `training_job` does for data and tasks that do not fit.

    `told` hears of each row, again as more is known, and gives it back judged.
    """

    def __init__(
        self, subject: Subject, options: AdviseOptions, told: Callable[[AdviceRow], AdviceRow], progress: Progress
    ) -> None:
        self._options, self._told, self._progress = options, told, progress
        self._checkpoint = subject.prepared.checkpoint
        self._parameters = sum(p.numel() for p in subject.model.parameters())
        self._job = training_job(self._checkpoint, options.training(_TWIN, steps=options.steps))
        self._twins: dict[tuple[int, int], _Run] = {}
        # A rate of the others means nothing to native recipes, nor do they take a trained model.
        tried = (n for n, r in RECIPES.items() if n != _TWIN and not r.arithmetic.is_native)
        self._rows = {n: self._begun(n) for n in tried}
        self._ends: dict[str, list[Ends]] = {}
        self._costs_s: list[float] = []  # of runs and their twins
        self.steps = 0

    @property
    def words(self) -> str:
        """What is trained."""
        o = self._options
        return f"{self._job.task.name}, {o.steps} steps of {o.batch_size} x {self._job.seq_len} tokens, lr {o.lr:g}"

    def run(self, deadline: Deadline) -> None:
        """Try recipes, the first in any case, until one stays within the budget or the time is over."""
        for row in self._rows.values():
            self._told(row)
        o = self._options
        pilot = self._twin(o.seed, min(_PILOT_STEPS, o.steps))
        waiting = self._within_memory()
        self.steps = self._longest(pilot, _PLANNED * (1 + _MORE_SEEDS), deadline)
        while waiting:
            name = waiting.pop(0)
            for seed in range(o.seed, o.seed + 1 + _MORE_SEEDS):
                if seed == o.seed or self._is_promising(name):
                    self._try(name, seed, deadline)
            if self._rows[name].meets:
                break
        for other in waiting:
            self._note(other, status="pruned", why=f"keeps no less memory than {name}, which keeps the quality")

    def _begun(self, name: str) -> AdviceRow:
        arithmetic = RECIPES[name].arithmetic
        return AdviceRow(
            purpose=_TRAIN,
            name=name,
            settings={"recipe": name},
            status="unmeasured",
            why="no time was left for its steps",
            memory_bytes=weight_bytes(self._parameters, arithmetic),
            memory_from="estimate without activations",
        )

    def _within_memory(self) -> list[str]:
        """The recipes that the budget has memory for, those that keep least first."""
        limit = self._options.budget.memory_bytes
        for name, row in self._rows.items():
            if limit is not None and (row.memory_bytes or 0) > limit:
                self._note(name, status="pruned", why="weights, gradients and optimizer alone exceed the memory")
        left = [n for n, row in self._rows.items() if row.status != "pruned"]
        return sorted(left, key=lambda n: TRAINING_OPTIMIZERS[RECIPES[n].arithmetic.optimizer].bytes_per_parameter)

    def _longest(self, pilot: _Run, runs: int, deadline: Deadline) -> int:
        """The steps that so many runs can have, and the twins of three seeds."""
        step_s = pilot.record.step_time_s or pilot.seconds / _PILOT_STEPS
        start_s = max(pilot.seconds - _PILOT_STEPS * step_s, 0.0)
        twins = 1 + _MORE_SEEDS
        left_s = deadline.left_s - (runs + twins) * start_s
        most = int(left_s / (step_s * (_SLOWER * runs + twins)))
        return max(min(_PILOT_STEPS, self._options.steps), min(most, self._options.steps))

    def _is_promising(self, name: str) -> bool:
        """Whether the runs so far leave hope that the recipe keeps the quality."""
        found = self._ends.get(name)
        quality = self._options.budget.quality
        return found is not None and least_high(found, steps=self.steps, horizon=self._options.steps) <= quality

    def _try(self, name: str, seed: int, deadline: Deadline) -> None:
        """One more run of a recipe, if there is time for one."""
        if self._costs_s and statistics.fmean(self._costs_s) > deadline.left_s:
            return
        started = time.perf_counter()
        try:
            twin = self._twin(seed, self.steps).record
            run = self._run(name, seed, self.steps, role="run").record
        except LpconvError as e:
            self._note(name, status="failed", why=finding(e), gap=None)
            return
        self._costs_s.append(time.perf_counter() - started)
        self._ends.setdefault(name, []).append(Ends.of(run, twin))
        gap = outlook(self._ends[name], steps=self.steps, horizon=self._options.steps)
        self._note(name, gap=gap, **self._measured(run))

    def _measured(self, run: RunRecord) -> Mapping[str, object]:
        memory = run.memory
        found: dict[str, object] = {"status": "measured", "step_time_s": run.step_time_s, "time_from": "measured here",
                                    "why": ""}  # fmt: skip
        if memory is not None:
            found |= {"memory_bytes": memory.measured_bytes, "memory_from": f"measured by {memory.instrument}"}
        return found

    def _note(self, name: str, **changed: object) -> None:
        row = replace(self._rows[name], **changed)  # type: ignore[arg-type]  # fields of the record
        self._rows[name] = self._told(row)

    def _twin(self, seed: int, steps: int) -> _Run:
        if (seed, steps) not in self._twins:
            self._twins[seed, steps] = self._run(_TWIN, seed, steps, role="twin")
        return self._twins[seed, steps]

    def _run(self, recipe: str, seed: int, steps: int, *, role: str) -> _Run:
        started = time.perf_counter()
        job, _ = with_critical(replace(self._job, options=self._options.training(recipe, steps=steps)))
        with tempfile.TemporaryDirectory() as folder:
            work = Work(
                role=role,
                seed=seed,
                arithmetic=RECIPES[recipe].arithmetic,
                folder=Path(folder),
                metrics=Path(folder) / "metrics.jsonl",
                track_every=0,
                log2_scale=lambda step: 0,
            )
            self._progress.start(f"{recipe}, {steps} steps, seed {seed}", 0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is known of a recipe stands in its row
                record = train_one(job, work, Silent()).record
        return _Run(record=record, seconds=time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A run beside its twin: the gap of held-out losses halfway and at the end, and what the twin learnt between.

    `kept` is the share of the intended updates that reached what is kept, 1 where nothing measured it.
    """

    half: float
    last: float
    learnt: float
    kept: float

    @classmethod
    def of(cls, run: RunRecord, twin: RunRecord) -> Self:
        """Of two finished runs of one seed."""
        ours, theirs = _losses(run), _losses(twin)
        kept = [u.edq for u in run.updates]
        return cls(
            half=ours[0] - theirs[0],
            last=ours[-1] - theirs[-1],
            learnt=theirs[0] - theirs[-1],
            kept=min(1.0, statistics.fmean(kept)) if kept else 1.0,
        )


def _losses(run: RunRecord) -> tuple[float, ...]:
    return next(s.values for s in run.evaluations if s.name == _METRIC)


def outlook(found: Sequence[Ends], *, steps: int, horizon: int) -> GapEstimate:
    """The gap of a recipe after `horizon` steps, from runs of `steps`; of one run the interval has no ends."""
    known = estimate_mean([e.last for e in found])
    seeds = (known.high - known.value) * math.sqrt(known.count + 1)  # of one new run, not of their mean
    drift, behind = _later(found, math.log2(horizon / steps))
    return replace(known, low=known.value - seeds - drift, high=known.value + seeds + drift + behind)


def least_high(found: Sequence[Ends], *, steps: int, horizon: int) -> float:
    """The upper end of the gap of a recipe after `horizon` steps, if all seeds gave the same."""
    drift, behind = _later(found, math.log2(horizon / steps))
    return statistics.fmean(e.last for e in found) + drift + behind


def _later(found: Sequence[Ends], doublings: float) -> tuple[float, float]:
    """What the gap may change by in either direction, and what it may grow by, in the steps that are still to come."""
    drift = abs(statistics.fmean(e.last - e.half for e in found)) * doublings
    lost = 1 - statistics.fmean(e.kept for e in found)
    return drift, lost * max(0.0, statistics.fmean(e.learnt for e in found)) * doublings


def estimate_mean(gaps: Sequence[float], confidence: float = 0.95) -> GapEstimate:
    """The mean of paired differences, with Student's interval, which has no ends for one or what is not finite."""
    mean, count = statistics.fmean(gaps), len(gaps)
    if count == 1 or not math.isfinite(mean):
        return GapEstimate(value=mean, low=-math.inf, high=math.inf, count=1)
    width = t_quantile(count - 1, confidence) * statistics.stdev(gaps) / count**0.5
    return GapEstimate(value=mean, low=mean - width, high=mean + width, count=count)
