"""One training run: a seed, an arithmetic, and the data that all runs of a job share."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback

from lpconv.kernels.half import HalfProducts
from lpconv.models.opening import Opened, model_errors, open_to_train
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import Task
from lpconv.progress import Progress
from lpconv.results import EvaluationRecord, PeakMemory, RunRecord, Series, UpdateQuality, from_json
from lpconv.scaled import apply_factors, calibrate, fallbacks, saved_bytes, scaled, scaling_of
from lpconv.train.allot import NUM_COPIES, PROBE_BATCHES, LossWatch, loss_allocation
from lpconv.train.callbacks import Recorder, Timetable
from lpconv.train.checkpoints import drop_broken, last_checkpoint, step_of
from lpconv.train.clock import Clock
from lpconv.train.exact import computes_in_fp32, in_fp32, renamed
from lpconv.train.examples import Collator, Examples, Stream
from lpconv.train.folder import Metrics, median_step_time
from lpconv.train.memory import StepMemory, check_room, explained, parameter_bytes
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import Prepared, operand_scale_of, prepare
from lpconv.train.processes import backend, is_main_process, num_processes, wait_for_all
from lpconv.train.recipes import Arithmetic
from lpconv.train.sharded import shard
from lpconv.train.trainer import DivergedError, LowPrecisionTrainer, predicted
from lpconv.train.watch import Watch, rate_of, tracked_records

__all__ = [
    "MEASURED_BATCHES",
    "Finished",
    "TrainingJob",
    "Work",
    "first_batches",
    "num_ranks",
    "open_start",
    "train_one",
]

MEASURED_BATCHES = 4  # by --calibrate and --critical auto


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What all runs of a command share. `num_labels` is set for classification, `mask_id` for masked models.

    `keep` counts the special tokens before and after a window, `num_targets` the classes or tokens there are.
    """

    directory: Path
    task: Task
    examples: Examples
    options: FinetuneOptions
    seq_len: int
    pad_id: int
    num_labels: int | None
    mask_id: int | None
    keep: tuple[int, int]
    num_targets: int

    def targets(self) -> Iterator[Any]:
        """What a loss is taken of in each training example."""
        first, last = self.keep
        for x in self.examples.train:
            yield x["labels"] if "labels" in x else x["input_ids"][first : len(x["input_ids"]) - last]

    def stream(self, seed: int, *, held_out: bool) -> Stream:
        """The examples of a run in their order, or the held-out ones, which are the same for all seeds."""
        o = self.options
        examples = self.examples.held_out if held_out else self.examples.train
        count = min(len(examples), o.eval_batches * o.batch_size) if held_out else o.steps * o.batch_size
        return Stream(
            examples,
            count,
            seed=-1 % 2**32 if held_out else seed,
            shuffled=not held_out,
            mask=self.mask_id if self.task.name == "mlm" else None,
            keep=self.keep,
            causal=self.task.name == "clm",
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Which run of a job: its role, seed and arithmetic, where its files go, and what is recorded of its values.

    Values are held against the formats of the job's arithmetic, gradients at 2^log2_scale(step). `lca` says that the
    loss change of its steps is allotted to layers.
    """

    role: str
    seed: int
    arithmetic: Arithmetic
    folder: Path
    metrics: Path
    track_every: int
    log2_scale: Callable[[int], int]
    lca: bool = False

    @property
    def words(self) -> str:
        """For the progress bar."""
        return f"{self.role} ({self.arithmetic.name}), seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that is done, with the model and optimizer it left."""

    record: RunRecord
    prepared: Prepared
    optimizer: torch.optim.Optimizer
    missing: tuple[str, ...]
    rows: list[dict[str, Any]]


def train_one(job: TrainingJob, work: Work, progress: Progress) -> Finished:
    """Train, from the last checkpoint in the work's folder if there is one.

    Raises DivergedError where a loss, or the gradients of many steps, are not finite.
    """
    clock = Clock()
    with quiet_transformers():
        checkpoint = _start_of(work.folder)
        arguments = _arguments(job.options, work, is_resumed=checkpoint is not None)
        with clock.spending("opening the model"):
            opened = open_start(job, work.seed)
        model = opened.model
        with clock.spending("estimating memory"):
            needed = _check_memory(job, work, model)
        with clock.spending("preparing"):
            prepared = prepare(model.to(arguments.device), work.arithmetic, job.options, seed=work.seed)
            if job.options.calibrate and work.arithmetic.method == "unit":
                _calibrate(job, work, prepared.model)
        if job.options.is_sharded:
            shard(prepared.model, work.arithmetic)
        if job.options.compile:
            # In place, so that its class, names and checkpoints stay; Trainer's `torch_compile` wraps it, and sets an
            # environment variable that later runs of a process would obey.
            prepared.model.compile()
        done = step_of(checkpoint) if checkpoint else 0
        metrics = Metrics(work.metrics if arguments.process_index == 0 else None, step=done)
        arithmetic = job.options.arithmetic
        scale = operand_scale_of(arithmetic, job.options) if arithmetic.is_scaled_fp8 else "static"
        rate = rate_of(model, arithmetic, work.log2_scale, operand_scale=scale)
        watch = Watch(model, work.track_every, rate)
        memory = None if job.options.compile or job.options.is_sharded else StepMemory(model)
        loss_watch = _loss_watch(job, work, prepared.model) if work.lca else None
        trainer = LowPrecisionTrainer(
            prepared,
            seed=work.seed,
            memory=memory,
            clock=clock,
            args=arguments,
            train_dataset=job.stream(work.seed, held_out=False),
            eval_dataset=job.stream(work.seed, held_out=True),
            data_collator=Collator(pad_id=job.pad_id),
            compute_metrics=_accuracy if job.num_labels else None,
            preprocess_logits_for_metrics=(lambda logits, labels: predicted(logits)) if job.num_labels else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Timetable(job.options, trainer))
        trainer.add_callback(Recorder(trainer, metrics, watch, loss_watch, progress))
        progress.start(work.words, job.options.steps, unit="steps", done=done)
        is_half = work.arithmetic.precision == "fp16" and arguments.device.type == "cpu"
        half = HalfProducts() if is_half else nullcontext()  # type: ignore[no-untyped-call]  # untyped in torch
        try:
            with explained(needed), half:
                trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        except DivergedError as e:
            _keep_good(work.folder, e)
            raise
        finally:
            if memory is not None:
                memory.stop()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    record = _record(work, metrics, watch, trainer)
    with quiet_transformers(), clock.spending("evaluating in fp32"):
        exact = _in_fp32(job, work, prepared, optimizer, record)
    record = dataclasses.replace(record, evaluations=(*record.evaluations, *exact))
    return Finished(record=record, prepared=prepared, optimizer=optimizer, missing=opened.missing, rows=metrics.rows)


def _in_fp32(
    job: TrainingJob, work: Work, prepared: Prepared, optimizer: torch.optim.Optimizer, record: RunRecord
) -> tuple[Series, ...]:
    """The held-out figures of the trained weights in fp32."""
    if computes_in_fp32(work.arithmetic):
        return renamed(record.evaluations)
    device = prepared.model.device
    batches = first_batches(job, job.stream(work.seed, held_out=True), job.options.eval_batches, device)
    model, values = open_start(job, work.seed).model.to(device), prepared.values(optimizer)
    return in_fp32(model, values, batches, step=job.options.steps, accuracy=bool(job.num_labels))


def _arguments(options: FinetuneOptions, work: Work, *, is_resumed: bool) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    share = options.batch_size // num_processes()
    return TrainingArguments(
        output_dir=str(work.folder),
        max_steps=options.steps,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        learning_rate=options.highest_lr,
        lr_scheduler_type="constant_with_warmup" if options.schedule == "constant" else options.schedule,
        warmup_steps=round(options.warmup * options.steps),
        max_grad_norm=options.clip or math.inf,
        train_sampling_strategy="sequential",  # the stream has its order
        eval_on_start=not is_resumed,
        eval_strategy="no",  # of later ones `Timetable` decides
        save_strategy="no",
        save_total_limit=None,  # `seal_checkpoint` decides
        logging_steps=1,
        report_to=list(options.log_to) or "none",
        run_name=work.words,
        disable_tqdm=True,
        use_cpu=not on_gpu,
        ddp_backend=backend(),
        seed=work.seed,
        remove_unused_columns=False,
        label_names=["labels"],
        prediction_loss_only=False,
    )


def _start_of(folder: Path) -> Path | None:
    """The checkpoint to go on from, None to begin; what is not whole is out of the way, for all processes."""
    if is_main_process():
        drop_broken(folder)
    wait_for_all()
    return last_checkpoint(folder)


def _keep_good(folder: Path, error: DivergedError) -> None:
    """Drop the checkpoint whose weights gave the loss that is not finite, and let the error name the one before."""
    shutil.rmtree(folder / f"checkpoint-{error.since - 1}", ignore_errors=True)
    kept = last_checkpoint(folder)
    error.hint = "lower --lr, or choose a recipe with more range; " + (
        f"the last good checkpoint is `{kept}`" if kept else "no checkpoint was saved before"
    )


def _check_memory(job: TrainingJob, work: Work, model: Any) -> dict[str, int]:
    """The estimate of a step; ResourceError where there is no room for it.

    Activations are those of one sequence in fp32, times the batch: low precision needs fewer.
    """
    parameters = sum(p.numel() for p in model.parameters())
    needed = parameter_bytes(parameters, work.arithmetic, num_ranks=num_ranks(job.options))
    if work.lca:
        needed["loss change allocation"] = 4 * NUM_COPIES * parameters
    check_room(needed, job.options.max_memory)
    batch = Collator(pad_id=job.pad_id)([job.stream(work.seed, held_out=False)[0]])
    share = job.options.batch_size // num_processes()
    with model_errors("the model does not run", hint="do config.json and tokenizer belong to the weights?"):
        needed["activations"] = saved_bytes(model, {k: v.to(model.device) for k, v in batch.items()}) * share
    check_room(needed, job.options.max_memory)
    return needed


def num_ranks(options: FinetuneOptions) -> int:
    """How many processes share the parameters."""
    return num_processes() if options.is_sharded else 1


def _loss_watch(job: TrainingJob, work: Work, model: Any) -> LossWatch:
    batches = first_batches(job, job.stream(work.seed, held_out=True), PROBE_BATCHES, model.device)
    return LossWatch(model, open_start(job, work.seed).model.to(model.device), batches)


def _calibrate(job: TrainingJob, work: Work, model: Any) -> None:
    """Fix scales measured on the run's first batches: in fp32, where nothing overflows and nothing vanishes."""
    batches = first_batches(job, job.stream(work.seed, held_out=False), MEASURED_BATCHES, model.device)
    apply_factors(model, calibrate(scaled(open_start(job, work.seed).model.to(model.device), method="unit"), batches))


def open_start(job: TrainingJob, seed: int) -> Opened:
    """The model that a run starts from, in fp32."""
    opened = open_to_train(job.task, job.directory, seed=seed, num_labels=job.num_labels)
    if opened.model.config.pad_token_id is None:
        opened.model.config.pad_token_id = job.pad_id
    return opened


def first_batches(job: TrainingJob, stream: Stream, count: int, device: torch.device) -> list[dict[str, Any]]:
    """The first batches of a stream, at most `count`."""
    size, collate = job.options.batch_size, Collator(pad_id=job.pad_id)
    starts = range(0, min(len(stream), count * size), size)
    batches = (collate([stream[i] for i in range(s, min(s + size, len(stream)))]) for s in starts)
    return [{k: v.to(device) for k, v in batch.items()} for batch in batches]


def _accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions == found.label_ids).mean())}


def _record(work: Work, metrics: Metrics, watch: Watch, trainer: LowPrecisionTrainer) -> RunRecord:
    evaluations = (metrics.series(name) for name in ("eval_loss", "eval_accuracy"))
    updates = tuple(
        UpdateQuality(step=r["step"], edq=r["edq"], edq_weights=r["edq_weights"], lost=r["lost"])
        for r in metrics.rows
        if "edq" in r
    )
    model = trainer.prepared.model
    return RunRecord(
        role=work.role,
        seed=work.seed,
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
