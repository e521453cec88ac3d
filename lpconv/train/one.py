"""One training run, from the opened model to its record."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback

from lpconv.errors import UnsupportedError
from lpconv.kernels.matmul import HalfProducts
from lpconv.layers import blocks_of
from lpconv.models.opening import FIT_HINT, Opened, error_line, model_errors
from lpconv.models.sharing import running_copy
from lpconv.probe.lca import LossChange
from lpconv.progress import Progress, counted, quiet_transformers
from lpconv.report.numbers import name_list
from lpconv.results import RunRecord, Series
from lpconv.scaled import adaptive_scaling, apply_factors, calibrate, check_gradients, saved_bytes, scaled
from lpconv.train.callbacks import NUM_COPIES, PROBE_BATCHES, Recorder, Timetable, run_record
from lpconv.train.folder import Metrics, drop_broken, last_checkpoint, step_of
from lpconv.train.held_out import in_fp32, rename_to_fp32
from lpconv.train.job import (
    MEASURED_BATCHES,
    TrainingJob,
    TrainingRun,
    first_batches,
    num_ranks,
    open_start,
    start_in_fp32,
)
from lpconv.train.lora import bytes_by_part, layers_without_adapter
from lpconv.train.memory import StepMemory, available_bytes, check_room, explain_oom, parameter_bytes
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import TrainingSetup, prepare, shard
from lpconv.train.processes import backend, is_main_process, mesh, num_processes, wait_for_all
from lpconv.train.recipes import RECIPES, Arithmetic
from lpconv.train.trainer import Clock, LowPrecisionTrainer


@dataclass(frozen=True, kw_only=True)
class Finished:
    record: RunRecord
    prepared: TrainingSetup
    optimizer: torch.optim.Optimizer


def train_one(job: TrainingJob, work: TrainingRun, progress: Progress) -> Finished:
    """Train, from the last checkpoint in the work's folder if there is one.

    Raises DivergedError if a loss, or the gradients of many steps in a row, are not finite.
    """
    clock = Clock(progress)
    with quiet_transformers():
        checkpoint = _start_of(work.folder)
        done = step_of(checkpoint) if checkpoint else 0
        arguments = _arguments(job.options, work, is_resumed=checkpoint is not None)
        opened, prepared, needed = _prepare(job, work, arguments.device, clock, is_resumed=checkpoint is not None)
        metrics = Metrics(work.metrics if arguments.process_index == 0 else None, step=done)
        loss_change = _loss_change(job, work, prepared.model) if work.lca else None
        trainer = _trainer(job, work, prepared, arguments, clock)
        trainer.add_callback(Timetable(job.options, trainer))
        trainer.add_callback(Recorder(trainer, metrics, loss_change, progress))
        progress.start(work.words, job.options.steps, unit="steps", done=done)
        with _compiler_errors() if job.options.compile else nullcontext():
            _train(trainer, work, checkpoint, needed)
    record = run_record(trainer, metrics, role=work.role, seed=work.seed)
    optimizer = trainer.own_optimizer
    with quiet_transformers(), clock.phase("evaluating in fp32"):
        if work.arithmetic.precision == "fp32" and not work.arithmetic.is_scaled:  # the run computed in fp32
            exact = rename_to_fp32(record.evaluations)
        elif work.arithmetic.on_codes:  # the published model has the same weights
            exact = ()
        else:
            exact = figures_in_fp32(job, work, prepared.model.device, prepared.values(optimizer), progress)
    notes = _notes(opened, work.arithmetic)
    record = dataclasses.replace(record, evaluations=(*record.evaluations, *exact), notes=notes)
    return Finished(record=record, prepared=prepared, optimizer=optimizer)


def _notes(opened: Opened, arithmetic: Arithmetic) -> tuple[str, ...]:
    """Notes for the user on how the model was opened."""
    notes = {
        "not in the checkpoint, so drawn from the seed": opened.missing,
        "transformers builds these from other weights, so each process held them whole for a while": opened.read_whole,
        "frozen without an adapter": layers_without_adapter(opened.model) if arithmetic.lora else (),
    }
    return tuple(f"{what}: {name_list(names)}" for what, names in notes.items() if names)


def _prepare(
    job: TrainingJob, work: TrainingRun, device: torch.device, clock: Clock, *, is_resumed: bool
) -> tuple[Opened, TrainingSetup, dict[str, int]]:
    """(opened model, setup for training on a device, estimated memory of a step by part)."""
    available = available_bytes(job.options.max_memory)  # before the model takes its part of a CPU's memory
    with clock.phase("opening the model"):
        opened = open_start(job, work.seed)
    with clock.phase("estimating memory"):
        needed = _check_memory(job, work, opened.model, available)
    if not is_resumed and job.options.check_gradients and not job.options.is_sharded:
        with clock.phase("checking gradients"):
            _check_gradients(job, work, opened.model.to(device), needed)
    with clock.phase("preparing"):
        model = opened.model.to(device)
        prepared = prepare(model, work.arithmetic, job.options, seed=work.seed, recovery=job.recovery)
        if job.options.calibrate and work.arithmetic.method == "unit":
            _calibrate(job, work, prepared.model)
    if job.options.is_sharded:
        shard(prepared.model, work.arithmetic)
    if job.options.compile:
        # In place, so its class, names and checkpoints stay. Trainer's `torch_compile` wraps the model, and sets an
        # environment variable that affects later runs of the process.
        prepared.model.compile()
    return opened, prepared, needed


def _trainer(
    job: TrainingJob, work: TrainingRun, prepared: TrainingSetup, arguments: TrainingArguments, clock: Clock
) -> LowPrecisionTrainer:
    # MemTracker needs gradients, and tensors with storage.
    is_measurable = not (job.options.compile or job.options.is_sharded or job.options.arithmetic.flag)
    trainer = LowPrecisionTrainer(
        prepared,
        seed=work.seed,
        memory=StepMemory(prepared.model) if is_measurable else None,
        clock=clock,
        args=arguments,
        train_dataset=job.stream(work.seed, held_out=False),
        eval_dataset=job.stream(work.seed, held_out=True),
        data_collator=job.collate,
        accuracy=_accuracy_of_batch(job),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@contextmanager
def _compiler_errors() -> Iterator[None]:
    """Convert errors of torch.compile, which occur at the first step, to UnsupportedError."""
    from torch._dynamo.exc import TorchDynamoException  # slow to import (seconds)

    try:
        with warnings.catch_warnings():  # it recommends TF32, in which the twin would no longer be fp32
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    except TorchDynamoException as e:
        raise UnsupportedError(f"torch.compile fails on the model: {error_line(e)}", hint="leave --compile out") from e


def _train(trainer: LowPrecisionTrainer, work: TrainingRun, checkpoint: Path | None, needed: dict[str, int]) -> None:
    # The optimizers of other bf16 recipes are compiled, which a dispatch mode prevents.
    is_half = (work.arithmetic.precision == "fp16" or work.arithmetic.on_codes) and trainer.args.device.type == "cpu"
    half = HalfProducts() if is_half else nullcontext()  # type: ignore[no-untyped-call]  # untyped in torch
    try:
        with explain_oom(needed), half:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        if trainer.memory is not None:
            trainer.memory.stop()


def figures_in_fp32(
    job: TrainingJob, work: TrainingRun, device: torch.device, values: Mapping[str, Tensor] | None, progress: Progress
) -> tuple[Series, ...]:
    """Held-out metrics of the job's model in fp32, with trained `values`, or without for the published model."""
    batches = first_batches(job, job.stream(work.seed, held_out=True), job.options.eval_batches, device)
    model = start_in_fp32(job, work.seed).to(device)
    evaluated = counted(batches, "evaluating in fp32", "batches", progress)
    return in_fp32(model, values, evaluated, step=job.options.steps, accuracy=_accuracy_of_batch(job))


def _arguments(options: FinetuneOptions, work: TrainingRun, *, is_resumed: bool) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    share = options.batch_size // num_processes()
    return TrainingArguments(
        output_dir=str(work.folder),
        max_steps=options.steps,
        per_device_train_batch_size=share,
        gradient_accumulation_steps=options.grad_accum,
        per_device_eval_batch_size=share,
        learning_rate=options.highest_lr,
        lr_scheduler_type="constant_with_warmup" if options.schedule == "constant" else options.schedule,
        warmup_steps=round(options.warmup * options.steps),
        max_grad_norm=options.clip or math.inf,
        train_sampling_strategy="sequential",  # the stream is already ordered
        eval_on_start=not is_resumed,
        eval_strategy="no",  # `Timetable` decides after the start
        save_strategy="no",
        save_total_limit=None,  # `seal_checkpoint` deletes old ones
        logging_steps=1,
        report_to=list(options.log_to) or "none",
        run_name=work.words,
        disable_tqdm=True,
        use_cpu=not on_gpu,
        ddp_backend=backend(),
        seed=work.seed,
        remove_unused_columns=False,
        average_tokens_across_devices=False,  # `compute_loss` weights the processes
    )


def _start_of(folder: Path) -> Path | None:
    """The checkpoint to resume from, or None; incomplete ones are deleted first, for all processes."""
    if is_main_process():
        drop_broken(folder)
    wait_for_all()
    return last_checkpoint(folder)


def _check_memory(job: TrainingJob, work: TrainingRun, model: Any, available: int) -> dict[str, int]:
    """Estimated memory of a step, including the model. Raises ResourceError if it is more than `available` bytes.

    Activations are measured for one sequence in fp32, times the batch size, an upper bound for low precision.
    """
    parameters = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    if work.arithmetic.lora:
        needed = bytes_by_part(model)
    else:
        needed = parameter_bytes(parameters, largest, work.arithmetic, num_ranks=num_ranks(job.options))
    if work.lca:
        needed["loss change allocation"] = 4 * NUM_COPIES * parameters
    check_room(needed, available)
    batch = job.collate([job.stream(work.seed, held_out=False)[0]])
    share = job.options.batch_size // num_processes()
    with model_errors("the model fails when it runs", hint=FIT_HINT):
        running = running_copy(model, mesh()) if job.options.is_sharded else model
        batch = {k: v.to(model.device) for k, v in batch.items()}
        needed["activations"] = share * _activations(running, batch, recomputes=job.options.gradient_checkpointing)
    check_room(needed, available)
    return needed


def _activations(model: Any, batch: Mapping[str, Tensor], *, recomputes: bool) -> int:
    """Bytes of activations for a batch; with gradient checkpointing, including a block that is computed again."""
    all_blocks = saved_bytes(model, batch)
    if not recomputes:
        return all_blocks
    inputs = saved_bytes(model.train(), batch)  # only then is checkpointing on
    model.eval()
    return inputs + (all_blocks - inputs) // len(blocks_of(model))


def _check_gradients(job: TrainingJob, work: TrainingRun, model: Any, needed: dict[str, int]) -> None:
    """Compare the gradients of one sequence with the plain model's, for scaled arithmetic and if memory allows."""
    arithmetic, scale = work.arithmetic, None
    if arithmetic.is_scaled:
        scale = functools.partial(scaled, method=arithmetic.method)
    elif arithmetic.loss_scale == "adaptive":
        scale = functools.partial(adaptive_scaling, compute="fp32")
    size = 12 * sum(p.numel() for p in model.parameters()) + needed["activations"]
    if scale is None or size > available_bytes(job.options.max_memory):
        return
    batch = first_batches(job, job.stream(work.seed, held_out=False), 1, model.device)[0]
    with model_errors("the gradients of the model cannot be checked", hint="pass --no-check-gradients"):
        check_gradients(model, {k: v[:1] for k, v in batch.items()}, scale)


def _loss_change(job: TrainingJob, work: TrainingRun, model: Any) -> Callable[[torch.optim.Optimizer], LossChange]:
    batches = first_batches(job, job.stream(work.seed, held_out=True), PROBE_BATCHES, model.device)
    twin = open_start(job, work.seed).model.to(model.device)
    return lambda optimizer: LossChange(model, optimizer, batches, twin=twin)


def _calibrate(job: TrainingJob, work: TrainingRun, model: Any) -> None:
    """Set static scales measured on the run's first batches in fp32, where nothing overflows or underflows."""
    batches = first_batches(job, job.stream(work.seed, held_out=False), MEASURED_BATCHES, model.device)
    measured = scaled(open_start(job, work.seed).model.to(model.device), method="unit")
    if job.options.is_sharded:
        shard(measured, RECIPES["fp32"].arithmetic)
    apply_factors(model, calibrate(measured, batches))


def _accuracy_of_batch(job: TrainingJob) -> Callable[[Any, Mapping[str, Tensor]], float]:
    """The accuracy on a batch, from a model's output; NaN for tasks without accuracy."""
    if job.recovery is not None:
        distillation = job.recovery.distillation
        return lambda out, batch: distillation.agreement
    if not job.num_labels:
        return lambda out, batch: math.nan
    return lambda out, batch: float((out.logits.argmax(-1) == batch["labels"]).double().mean())
