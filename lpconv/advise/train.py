"""Try recipes on a model: a few training steps next to the fp32 twin, on the same batches.

A pilot of the twin measures the cost of a step, and so how many steps a few recipes can have with three seeds within
the time. Recipes with the least memory come first. Each trains with one seed; if it may keep the quality, with two
more, whose spread shows how much a single run may differ. The first recipe that keeps the quality is the answer: the
remaining ones need more memory.

A few steps do not show the cost over the whole training. The interval is for one new run at its end, widened by three
effects:

- *Seeds.* Runs of one recipe differ between seeds; a single run says nothing about another.
- *Drift.* If the gap still changed in the second half of the steps, it may change as much with each doubling.
- *Lost updates.* A 16-bit optimizer that drops part of each intended update (1 - EDQ, arXiv 2405.03637 §4.2) may fall
  behind by that part of what the twin has yet to learn. This shows late, so a few steps do not measure it.
"""

import functools
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from lpconv.advise.candidates import judge_row
from lpconv.advise.options import AdviseOptions, Budget
from lpconv.errors import LpconvError, problem_text
from lpconv.progress import Deadline, Progress
from lpconv.results import AdviceRow, GapEstimate, RecipeNoise, RunRecord
from lpconv.storage.checkpoint import Checkpoint
from lpconv.student import estimate_mean
from lpconv.train.job import TrainingRun, training_job, with_measured
from lpconv.train.memory import weight_bytes
from lpconv.train.one import train_one
from lpconv.train.recipes import RECIPES, TRAINING_OPTIMIZERS

_TWIN = "fp32"
_PILOT_STEPS = 6  # minimum for measuring time and memory
_MORE_SEEDS = 2
_PLANNED = 3  # recipes to allow time for, with all seeds
_SLOWER = 2.0  # time of an emulated low-precision step relative to the twin's
_METRIC = "eval_loss"


class Runs:
    """Short training runs in any recipe. Raises the errors of `training_job` for unsuitable data and tasks."""

    def __init__(self, checkpoint: Checkpoint, options: AdviseOptions, progress: Progress) -> None:
        self.options = options
        self._progress = progress
        self._job = training_job(checkpoint, options.training(_TWIN, steps=options.steps))
        self._twins: dict[tuple[int, int], RunRecord] = {}

    @property
    def words(self) -> str:
        """Description of the training."""
        o = self.options
        return f"{self._job.task.name}, {o.steps} steps of {o.batch_size} x {self._job.seq_len} tokens, lr {o.lr:g}"

    def longest(self, deadline: Deadline) -> int:
        """Number of steps that a few recipes can have with all seeds within the time, from a pilot run of the twin."""
        runs, twins = _PLANNED * (1 + _MORE_SEEDS), 1 + _MORE_SEEDS
        start_s, step_s = self._costs_s
        left_s = deadline.left_s - (runs + twins) * start_s
        most = int(left_s / (step_s * (_SLOWER * runs + twins)))
        return max(min(_PILOT_STEPS, self.options.steps), min(most, self.options.steps))

    def seconds(self, steps: int) -> float:
        """Estimated time of a recipe with all seeds, from the pilot run."""
        start_s, step_s = self._costs_s
        return (1 + _MORE_SEEDS) * (2 * start_s + (1 + _SLOWER) * steps * step_s)

    @functools.cached_property
    def _costs_s(self) -> tuple[float, float]:
        """Seconds for the start of a run, and for each step, from a pilot run of the twin."""
        started = time.perf_counter()
        pilot = self.twin(self.options.seed, min(_PILOT_STEPS, self.options.steps))
        seconds = time.perf_counter() - started
        step_s = pilot.step_time_s or seconds / _PILOT_STEPS
        return max(seconds - _PILOT_STEPS * step_s, 0.0), step_s

    def twin(self, seed: int, steps: int) -> RunRecord:
        """The fp32 run of a seed, trained once and cached."""
        if (seed, steps) not in self._twins:
            self._twins[seed, steps] = self.run(_TWIN, seed, steps, role="twin")
        return self._twins[seed, steps]

    def run(self, recipe: str, seed: int, steps: int, *, role: str = "run") -> RunRecord:
        """Train with a recipe."""
        job, _ = with_measured(replace(self._job, options=self.options.training(recipe, steps=steps)))
        self._job = replace(self._job, objective=job.objective)
        with tempfile.TemporaryDirectory() as folder:
            work = TrainingRun(
                role=role,
                seed=seed,
                arithmetic=RECIPES[recipe].arithmetic,
                folder=Path(folder),
                metrics=Path(folder) / "metrics.jsonl",
            )
            self._progress.start(f"{recipe}, {steps} steps, seed {seed}", 0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the row of a recipe contains these warnings
                return train_one(job, work, self._progress).record


def recipe_rows(model: Any, budget: Budget) -> list[AdviceRow]:
    """The recipes to try on a model. Those whose memory exceeds the budget are pruned."""
    num_parameters = sum(p.numel() for p in model.parameters())
    rows = []
    for name, recipe in RECIPES.items():
        # Native recipes need another learning rate, and do not accept trained models.
        if name == _TWIN or recipe.arithmetic.is_native:
            continue
        needed = weight_bytes(num_parameters, recipe.arithmetic)
        fits = budget.memory_bytes is None or needed <= budget.memory_bytes
        rows.append(
            AdviceRow(
                purpose="train",
                name=name,
                settings={"recipe": name},
                status="unmeasured" if fits else "pruned",
                why="there was no time left to train it"
                if fits
                else "weights, gradients and optimizer state alone exceed the memory limit",
                memory_bytes=needed,
                memory_from="estimate without activations",
            )
        )
    return rows


def drop_noisy_recipes(rows: Iterable[AdviceRow], noise: Iterable[RecipeNoise]) -> list[AdviceRow]:
    """The rows, with recipes pruned whose gradients are below √3 of their rounding noise."""
    drowned = {
        n.name: f"its gradients are {n.ratio:.2g} times their rounding noise, less than √3"
        for n in noise
        if n.is_drowned
    }
    return [replace(r, status="pruned", why=drowned[r.name]) if r.name in drowned else r for r in rows]


def measure_recipes(runs: Runs, rows: Iterable[AdviceRow], steps: int, deadline: Deadline) -> Iterator[AdviceRow]:
    """Yield updated rows, until one is within the budget."""
    o, costs_s = runs.options, list[float]()  # seconds per run, including its twin
    kept_bytes = {n: TRAINING_OPTIMIZERS[r.arithmetic.optimizer].bytes_per_parameter for n, r in RECIPES.items()}
    waiting = sorted((row for row in rows if row.status != "pruned"), key=lambda row: kept_bytes[row.name])
    while waiting:
        row, ends = waiting.pop(0), list[Ends]()
        for seed in range(o.seed, o.seed + 1 + _MORE_SEEDS):
            if seed != o.seed and not (ends and least_high(ends, steps=steps, horizon=o.steps) <= o.budget.quality):
                continue  # it cannot keep the quality
            if costs_s and statistics.fmean(costs_s) > deadline.left_s:
                continue
            started = time.perf_counter()
            try:
                twin = runs.twin(seed, steps)
                run = runs.run(row.name, seed, steps)
            except LpconvError as e:
                row = judge_row(replace(row, status="failed", why=problem_text(e), gap=None), o.budget)
            else:
                costs_s.append(time.perf_counter() - started)
                ends.append(Ends.of(run, twin))
                row = judge_row(_measured_row(row, run, outlook(ends, steps=steps, horizon=o.steps)), o.budget)
            yield row
        if row.meets:
            why = f"uses at least as much memory as {row.name}, which is good enough"
            yield from (replace(other, status="pruned", why=why) for other in waiting)
            return


def _measured_row(row: AdviceRow, run: RunRecord, gap: GapEstimate) -> AdviceRow:
    """The row with the gap over all its runs, and memory and time of the last one."""
    row = replace(row, status="measured", why="", gap=gap, step_time_s=run.step_time_s, time_from="measured here")
    if run.memory is None:
        return row
    return replace(row, memory_bytes=run.memory.measured_bytes, memory_from=f"measured by {run.memory.instrument}")


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Held-out gaps of a run halfway and at the end, and the twin's improvement in between.

    `kept` is the share of the intended updates that reached the stored weights, 1 if it was not measured.
    """

    half: float
    last: float
    learnt: float
    kept: float

    @classmethod
    def of(cls, run: RunRecord, twin: RunRecord) -> Self:
        """Make the record from two finished runs of one seed."""
        ours, theirs = _losses(run), _losses(twin)
        kept = [u.edq for u in run.updates]
        return cls(
            half=ours[0] - theirs[0],
            last=ours[-1] - theirs[-1],
            learnt=theirs[0] - theirs[-1],
            kept=min(1.0, statistics.fmean(kept)) if kept else 1.0,
        )


def _losses(run: RunRecord) -> tuple[float, ...]:
    """Held-out losses from halfway on; the first evaluation is before training."""
    return next(s.values[1:] for s in run.evaluations if s.name == _METRIC)


def outlook(ends: Sequence[Ends], *, steps: int, horizon: int) -> GapEstimate:
    """Forecast of a recipe's gap after `horizon` steps, from runs of `steps`; with one run the interval is infinite."""
    known = estimate_mean([e.last for e in ends])
    seeds = (known.high - known.value) * math.sqrt(known.count + 1)  # half width for one new run instead of the mean
    drift, behind = _later_change(ends, math.log2(horizon / steps))
    return replace(known, low=known.value - seeds - drift, high=known.value + seeds + drift + behind)


def least_high(ends: Sequence[Ends], *, steps: int, horizon: int) -> float:
    """Upper end of a recipe's gap after `horizon` steps if all seeds agreed."""
    drift, behind = _later_change(ends, math.log2(horizon / steps))
    return statistics.fmean(e.last for e in ends) + drift + behind


def _later_change(ends: Sequence[Ends], doublings: float) -> tuple[float, float]:
    """(change of the gap in either direction, its possible growth) over the remaining steps."""
    drift = abs(statistics.fmean(e.last - e.half for e in ends)) * doublings
    lost = 1 - statistics.fmean(e.kept for e in ends)
    return drift, lost * max(0.0, statistics.fmean(e.learnt for e in ends)) * doublings
