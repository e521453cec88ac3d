"""Callbacks of Trainer's loop: the schedule of evaluations and checkpoints, rows of metrics, progress.

Only complete checkpoints count: Trainer writes a dozen files into `checkpoint-STEP` and takes the folder with the
largest number as complete. Here a list of the files' hashes is written last.
"""

import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lpconv.errors import LpconvError, UnreadError
from lpconv.optim.base import LowPrecisionOptimizer
from lpconv.optim.diagnostics import combine
from lpconv.progress import Progress
from lpconv.results import to_json
from lpconv.storage.partfile import NOT_A_FILE, read_error, sha256_of, write_small, writing
from lpconv.train.folder import Metrics
from lpconv.train.options import FinetuneOptions
from lpconv.train.processes import is_main_process, wait_for_all
from lpconv.train.record import LossWatch
from lpconv.train.trainer import LowPrecisionTrainer
from lpconv.train.watch import StepWatch

_SAVE_S = 600.0  # most seconds that an interruption loses, if --save-every is not given
_SEAL = "SHA256SUMS"
_KEPT = 2  # two, since the last one may be diverging
_PREFIX = "checkpoint-"


class Timetable(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Schedules evaluations every so many steps and after the last, and checkpoints by steps or every ten minutes.

    Never saves after a skipped step, nor by time after the last step.
    """

    def __init__(self, options: FinetuneOptions, trainer: LowPrecisionTrainer) -> None:
        self.eval_every, self.save_every, self.trainer = options.every("eval"), options.save_every, trainer
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

    Also records and measures the steps that are due, and reports progress. Step times exclude loss change allocation.
    """

    def __init__(
        self,
        trainer: LowPrecisionTrainer,
        metrics: Metrics,
        watch: StepWatch,
        loss_watch: LossWatch | None,
        progress: Progress,
    ) -> None:
        self.trainer, self.memory, self.metrics = trainer, trainer.memory, metrics
        self.watch, self.loss_watch, self.progress = watch, loss_watch, progress
        self.allotted: dict[str, Any] = {}
        self.started_s = self.learning_rate = 0.0
        self.is_measured = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.metrics.flush()
        self.started_s = time.perf_counter()
        self.learning_rate = _learning_rate(self.trainer)  # at the end of a step it is that of the next one
        step = state.global_step + 1
        self.is_measured = self.memory is not None and self.memory.begin(step, self.trainer.own_optimizer)
        self.watch.begin(step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.memory is not None:
            self.memory.end()
        if self.loss_watch is not None:
            self.loss_watch.before_step(self.trainer.own_optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.loss_watch is not None:
            self.allotted = {"lca": self.loss_watch.after_step(state.global_step + 1)}
            self.trainer.clock.add("loss change allocation", self.loss_watch.seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        time_s = time.perf_counter() - self.started_s - (self.loss_watch.seconds if self.loss_watch else 0.0)
        trainer.clock.add("steps", time_s)
        with trainer.clock.spending("records of values"):
            tracked = self.watch.end()
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
        if tracked:
            row["tracked"] = tracked
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
        if self.trainer.distillation is not None:
            sizes, _, shares = zip(*self.trainer.evaluated, strict=True)
            self.metrics.add({"eval_accuracy": statistics.fmean(shares, weights=sizes)})

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


def seal_checkpoint(folder: Path, step: int) -> None:
    """Mark the checkpoint of a step as complete, and delete all but the last two."""
    checkpoint = folder / f"{_PREFIX}{step}"
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != _SEAL)
    lines = [f"{sha256_of(p)}  {p.relative_to(checkpoint).as_posix()}\n" for p in files]
    write_small(checkpoint / _SEAL, "".join(lines))
    with writing(folder):
        for old in _checkpoints(folder)[_KEPT:]:
            shutil.rmtree(old)


def last_checkpoint(folder: Path) -> Path | None:
    """The latest complete checkpoint, or None."""
    return next((c for c in _checkpoints(folder) if _is_whole(c)), None)


def drop_broken(folder: Path) -> None:
    """Delete incomplete checkpoints, whose folders later ones will use."""
    with writing(folder):
        for checkpoint in _checkpoints(folder):
            if not _is_whole(checkpoint):
                shutil.rmtree(checkpoint)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, latest first."""
    folders = (p for p in folder.glob(f"{_PREFIX}*") if p.is_dir() and p.name.removeprefix(_PREFIX).isdecimal())
    return sorted(folders, key=step_of, reverse=True)


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file is unchanged. Raises UnreadError if the disk fails."""
    try:
        lines = (checkpoint / _SEAL).read_text(encoding="utf-8").splitlines()
        sums = [line.partition("  ")[::2] for line in lines]
        return bool(sums) and all(sha256_of(checkpoint / name) == digest for digest, name in sums)
    except UnreadError:  # unknown, so nothing may be deleted
        raise
    except (*NOT_A_FILE, ValueError, LpconvError):
        return False
    except OSError as e:
        raise read_error(e, checkpoint / _SEAL) from e
