"""Callbacks of Trainer's loop: evaluations and checkpoints when due, rows of metrics and their summary, progress."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback

from lpconv.optim.base import LowPrecisionOptimizer
from lpconv.optim.diagnostics import combine
from lpconv.probe.lca import LossChange, LossChangeStep, by_layer, summarise
from lpconv.progress import Progress
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
from lpconv.train.folder import Metrics, median_step_time, seal_checkpoint
from lpconv.train.options import FinetuneOptions
from lpconv.train.processes import is_main_process, wait_for_all
from lpconv.train.trainer import LowPrecisionTrainer

_SAVE_S = 600.0  # most seconds that an interruption loses, if --save-every is not given
PROBE_BATCHES = 2
NUM_COPIES = 14  # fp32 copies of the parameters during a measured step, including the twin and its gradients


class Timetable(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Schedules evaluations by steps and after the last one, and checkpoints by steps or every ten minutes.

    Never saves after a skipped step, nor by time after the last step.
    """

    def __init__(self, options: FinetuneOptions, trainer: LowPrecisionTrainer) -> None:
        self.eval_every, self.save_every, self.trainer = options.eval_interval, options.save_every, trainer
        self.saved_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, is_last = state.global_step, state.global_step == state.max_steps
        control.should_evaluate = is_last or (self.eval_every > 0 and step % self.eval_every == 0)
        control.should_save = self._is_save_due(step, is_last) and self.trainer.num_skipped_in_a_row == 0
        control.should_log = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_s = time.monotonic()

    def _is_save_due(self, step: int, is_last: bool) -> bool:
        if self.save_every is not None:
            return self.save_every > 0 and step % self.save_every == 0
        return not is_last and self.trainer.agree(time.monotonic() - self.saved_s > _SAVE_S)


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes a row per step, and one for step 0 with the evaluation before training.

    Also measures the steps that are due, and reports progress. `loss_change` makes the allocation of the loss change
    for an optimizer, if that is wanted; step times exclude it.
    """

    def __init__(
        self,
        trainer: LowPrecisionTrainer,
        metrics: Metrics,
        loss_change: Callable[[Optimizer], LossChange] | None,
        progress: Progress,
    ) -> None:
        self.trainer, self.memory, self.metrics = trainer, trainer.memory, metrics
        self.loss_change, self.progress = loss_change, progress
        self.lca: LossChange | None = None
        self.allotted: dict[str, Any] = {}
        self.started_s = self.learning_rate = self.lca_s = 0.0
        self.is_measured = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.loss_change is not None:  # only now is there an optimizer
            self.lca = self.loss_change(self.trainer.own_optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.metrics.flush()
        self.started_s = time.perf_counter()
        self.learning_rate = _learning_rate(self.trainer)  # at the end of a step it is that of the next one
        step = state.global_step + 1
        self.is_measured = self.memory is not None and self.memory.begin(step, self.trainer.own_optimizer)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.memory is not None:
            self.memory.next_batch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.memory is not None:
            self.memory.end()
        if self.lca is not None:
            started_s = time.perf_counter()
            self.lca.before_step()
            self.lca_s = time.perf_counter() - started_s

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.lca is not None:
            started_s = time.perf_counter()
            change = by_layer(self.lca.after_step())
            self.lca.steps.clear()  # stored in the rows
            self.allotted = {"lca": to_json(dataclasses.replace(change, step=state.global_step + 1))}
            self.lca_s += time.perf_counter() - started_s
            self.trainer.clock.add("loss change allocation", self.lca_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        time_s = time.perf_counter() - self.started_s - self.lca_s
        trainer.clock.add("steps", time_s)
        last = trainer.last
        row: dict[str, Any] = {
            "step": state.global_step,
            "loss": last["loss"],
            "grad_norm": last["grad_norm"],
            "lr": self.learning_rate,
            "loss_scale": last["loss_scale"],
            "skipped": bool(last["skipped"]),
            "time_s": time_s,
        }
        if self.is_measured:
            row["memory"] = to_json(self.memory.record) if self.memory is not None else None
        self.metrics.begin(row | _updates(trainer.own_optimizer) | self.allotted)
        self.progress.advance(1, f"loss {last['loss']:.4f}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.metrics.begin({"step": 0})
        self.metrics.add({name: metrics[name] for name in ("eval_loss", "eval_accuracy") if name in (metrics or {})})
        if state.global_step in (0, state.max_steps):
            self.metrics.add({"eval_batches": self.trainer.evaluated})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.metrics.flush()  # resuming after this step needs its row
        wait_for_all()
        if is_main_process():
            seal_checkpoint(Path(args.output_dir), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.metrics.flush()


def _learning_rate(trainer: LowPrecisionTrainer) -> float:
    """The learning rate of the model's weights. Groups of scaled parameters have the rate divided by their scale."""
    group = trainer.optimizer.param_groups[0]
    return float(group["lr"]) * float(group.get("scale", 1.0))


def _updates(optimizer: Any) -> dict[str, float]:
    """Quality of the step's update, if the optimizer recorded it."""
    if not isinstance(optimizer, LowPrecisionOptimizer) or not optimizer.records:
        return {}
    record = combine(optimizer.records)
    if math.isnan(record.edq_full):
        return {}
    return {"edq": record.edq_full, "edq_weights": record.edq_hi, "lost": record.lost_full}


def run_record(trainer: LowPrecisionTrainer, metrics: Metrics, *, role: str, seed: int) -> RunRecord:
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
        updates=updates,
        memory=next((from_json(PeakMemory, r["memory"]) for r in reversed(metrics.rows) if r.get("memory")), None),
        first_nonfinite=trainer.first_nonfinite,
        loss_allocation=loss_allocation(metrics.rows),
        fallbacks=dict(fallbacks(model)) if scaling_of(model) else {},
        held_out=tuple(_evaluation(r["step"], r["eval_batches"]) for r in metrics.rows if "eval_batches" in r),
    )


def _evaluation(step: int, batches: list[list[float]]) -> EvaluationRecord:
    """An evaluation from batches (targets, loss, accuracy). Rows read from a file have non-finite numbers as text."""
    sizes, losses, accuracies = (tuple(map(float, column)) for column in zip(*batches, strict=True))
    has_classes = not any(map(math.isnan, accuracies))
    return EvaluationRecord(
        step=step, sizes=tuple(map(int, sizes)), losses=losses, accuracies=accuracies if has_classes else ()
    )


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
        **{n: getattr(total, n) for n in ("loss_before", "loss_after", "change", "rounding", "closure_error")},
        rounding_share=total.rounding_share if total.change != total.rounding else None,
        layers=tuple(
            LayerChange(layer=a.name, change=a.change, rounding=a.rounding, helped=a.helped if a.num_moved else None)
            for a in total.parameters
        ),
    )
