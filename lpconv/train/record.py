"""The record of a training run: series, evaluations by batch, loss change allocation and tracked values."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.probe.lca import LossChange, LossChangeStep, by_layer, summarise
from lpconv.results import (
    EvaluationRecord,
    LayerChange,
    LossAllocation,
    PeakMemory,
    RunRecord,
    UpdateQuality,
    from_json,
    to_json,
)
from lpconv.scaled import fallbacks, scaling_of
from lpconv.train.folder import Metrics, median_step_time
from lpconv.train.trainer import LowPrecisionTrainer
from lpconv.train.watch import StepWatch, tracked_records

PROBE_BATCHES = 2
NUM_COPIES = 14  # fp32 copies of the parameters during a measured step, including the twin and its gradients


def run_record(trainer: LowPrecisionTrainer, metrics: Metrics, watch: StepWatch, *, role: str, seed: int) -> RunRecord:
    """The record of a finished run, without its fp32 metrics."""
    evaluations = (metrics.series(name) for name in ("eval_loss", "eval_accuracy"))
    updates = tuple(from_json(UpdateQuality, r) for r in metrics.rows if "edq" in r)
    model = trainer.prepared.model
    return RunRecord(
        role=role,
        seed=seed,
        losses=metrics.series("loss"),
        evaluations=tuple(s for s in evaluations if s.steps),
        loss_scales=metrics.series("loss_scale"),
        num_skipped=trainer.num_skipped,
        step_time_s=median_step_time(metrics.rows),
        seconds=trainer.clock.seconds,
        overhead=watch.overhead,
        tracked=tracked_records(metrics.rows),
        updates=updates,
        memory=next((from_json(PeakMemory, r["memory"]) for r in metrics.rows if r.get("memory")), None),
        first_nonfinite=trainer.first_nonfinite,
        loss_allocation=loss_allocation(metrics.rows),
        fallbacks=dict(fallbacks(model)) if scaling_of(model) else {},
        held_out=tuple(_evaluation(r["step"], r["eval_batches"]) for r in metrics.rows if "eval_batches" in r),
    )


def _evaluation(step: int, batches: list[list[float]]) -> EvaluationRecord:
    """An evaluation from batches (examples, loss, accuracy). Rows read from a file have non-finite numbers as text."""
    sizes, losses, accuracies = (tuple(map(float, column)) for column in zip(*batches, strict=True))
    has_classes = not any(map(math.isnan, accuracies))
    return EvaluationRecord(
        step=step, sizes=tuple(map(int, sizes)), losses=losses, accuracies=accuracies if has_classes else ()
    )


class LossWatch:
    """Allocates the loss change of each step of `model`. `twin` is the same model in fp32, and is overwritten.

    `seconds` is the time of the last step's measurement.
    """

    def __init__(self, model: nn.Module, twin: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self.model, self.twin, self.batches = model, twin, batches
        self.seconds = 0.0
        self._lca: LossChange | None = None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call in place of `optimizer.step()`, with gradients unscaled and clipped."""
        started = time.perf_counter()
        if self._lca is None:  # the optimizer exists, or is restored, only once training begins
            self._lca = LossChange(self.model, optimizer, self.batches, twin=self.twin)
        self._lca.before_step()
        self.seconds = time.perf_counter() - started

    def after_step(self, step: int) -> dict[str, Any]:
        """Call after step number `step`. Returns its allocation by layer, for the step's row."""
        assert self._lca is not None
        started = time.perf_counter()
        change = by_layer(self._lca.after_step())
        self._lca.steps.clear()  # stored in the rows
        self.seconds += time.perf_counter() - started
        row: dict[str, Any] = to_json(dataclasses.replace(change, step=step))
        return row


def loss_allocation(rows: Iterable[Mapping[str, Any]]) -> LossAllocation | None:
    """The sum of a run's allocations; None if nothing was measured.

    A run resumed on another device may not reproduce its last loss bit for bit; steps before that are left out.
    """
    steps = [from_json(LossChangeStep, row["lca"]) for row in rows if "lca" in row]
    if not steps:
        return None
    breaks = [i for i in range(1, len(steps)) if steps[i - 1].loss_after != steps[i].loss_before]
    stretch = steps[breaks[-1] :] if breaks else steps
    total = summarise(stretch)
    return LossAllocation(
        first_step=stretch[0].step,
        last_step=total.step,
        num_batches=PROBE_BATCHES,
        loss_before=total.loss_before,
        loss_after=total.loss_after,
        change=total.change,
        rounding=total.rounding,
        rounding_share=total.rounding_share if total.change != total.rounding else None,
        closure_error=total.closure_error,
        layers=tuple(
            LayerChange(layer=a.name, change=a.change, rounding=a.rounding, helped=a.helped if a.num_moved else None)
            for a in total.parameters
        ),
    )
