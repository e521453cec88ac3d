"""What a training run leaves, as a record: its series, its evaluations batch by batch, what was seen on the way."""

import math

from lpconv.results import EvaluationRecord, PeakMemory, RunRecord, UpdateQuality, from_json
from lpconv.scaled import fallbacks, scaling_of
from lpconv.train.allot import loss_allocation
from lpconv.train.folder import Metrics, median_step_time
from lpconv.train.trainer import LowPrecisionTrainer
from lpconv.train.watch import Watch, tracked_records


def run_record(trainer: LowPrecisionTrainer, metrics: Metrics, watch: Watch, *, role: str, seed: int) -> RunRecord:
    """The record of a run that has been trained, without its figures in fp32."""
    evaluations = (metrics.series(name) for name in ("eval_loss", "eval_accuracy"))
    updates = tuple(
        UpdateQuality(step=r["step"], edq=r["edq"], edq_weights=r["edq_weights"], lost=r["lost"])
        for r in metrics.rows
        if "edq" in r
    )
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
    """Of batches as (examples, loss, accuracy); rows that were read again hold what is not finite as text."""
    sizes, losses, accuracies = (tuple(map(float, column)) for column in zip(*batches, strict=True))
    has_classes = not any(map(math.isnan, accuracies))
    return EvaluationRecord(
        step=step, sizes=tuple(map(int, sizes)), losses=losses, accuracies=accuracies if has_classes else ()
    )
