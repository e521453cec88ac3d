"""Shared data of a command's training runs with the checks on them, and the description of a single run."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.integration_utils import get_available_reporting_integrations

from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.layouts.reader import stored_shapes
from lpconv.models.inputs import sequence_length, vocabulary_size
from lpconv.models.objective import Objective, find_objective
from lpconv.models.opening import Opened, open_to_train, transformers_config
from lpconv.models.tasks import CLM, MLM, Task, find_task, main_input, task_of
from lpconv.models.tokenizer import read_tokenizer, special_id, special_tokens
from lpconv.models.whole import check_complete
from lpconv.progress import quiet_transformers
from lpconv.report.numbers import name_list
from lpconv.scaled.critical import InputRisk, critical_modules, input_risks
from lpconv.storage.checkpoint import Checkpoint
from lpconv.train.data import check_guess, check_labels, read_rows, with_template
from lpconv.train.examples import Example, Examples, Stream, classification, collate, pack_examples, sequence_pairs
from lpconv.train.lora import add_adapters
from lpconv.train.memory import check_room, keep_only_inputs, parameter_bytes
from lpconv.train.options import OWN_LOOP, FinetuneOptions
from lpconv.train.prepare import shard
from lpconv.train.processes import mesh, num_processes
from lpconv.train.recipes import RECIPES, Arithmetic
from lpconv.train.recover import Recovery

MEASURED_BATCHES = 4  # for --calibrate and --critical auto


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Data shared by all runs of a command. `mask_id` is set for masked models.

    `keep` is the number of special tokens before and after a window, `num_targets` the number of classes or tokens.
    `recovery` is set for --recover. `objective` is None until it is found. `guess` names task and columns.
    """

    checkpoint: Checkpoint
    task: Task
    examples: Examples
    options: FinetuneOptions
    seq_len: int
    pad_id: int
    mask_id: int | None
    keep: tuple[int, int]
    num_targets: int
    recovery: Recovery | None = None
    objective: Objective | None = None
    guess: str | None = None

    @property
    def num_labels(self) -> int | None:
        return len(self.examples.labels) or None

    @property
    def loss(self) -> str:
        return self.task.loss if self.recovery is None else "KL divergence from the source's predictions"

    def targets(self) -> Iterator[Any]:
        first, last = self.keep
        for x in self.examples.train:
            yield x["labels"] if "labels" in x else x["input_ids"][first : len(x["input_ids"]) - last]

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        return collate(examples, self.pad_id, self.seq_len)

    def stream(self, seed: int, *, held_out: bool) -> Stream:
        """The examples of a run in order, or the held-out ones, which are equal for all seeds."""
        o = self.options
        examples = self.examples.held_out if held_out else self.examples.train
        count = min(len(examples), o.eval_batches * o.batch_size) if held_out else o.steps * o.sequences_per_step
        if num_processes() > 1:  # accelerate would fill an incomplete batch with repeated examples
            count -= count % o.batch_size
        return Stream(
            examples,
            count,
            seed=-1 % 2**32 if held_out else seed,
            shuffled=not held_out,
            mask=self.mask_id if self.task.name == "mlm" else None,
            keep=self.keep,
            causal=self.task.name == "clm",
            shifted=self.objective is not None and self.objective.shifted,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run of a job: role, seed, arithmetic and folders. `lca`: allocate the loss change of its steps to layers."""

    role: str
    seed: int
    arithmetic: Arithmetic
    folder: Path
    metrics: Path
    lca: bool = False

    @property
    def words(self) -> str:
        return f"{self.role} ({self.arithmetic.name}), seed {self.seed}"


def training_job(checkpoint: Checkpoint, options: FinetuneOptions) -> TrainingJob:
    """The task, and its examples in the model's tokens. The model is not loaded.

    Raises an `LpconvError` for data that do not fit the model or the task, and if there is no memory for its weights.
    """
    directory = checkpoint.directory
    reads = main_input(checkpoint.config)
    if reads != "input_ids":
        raise UnsupportedError(
            f"`{directory.name}` reads `{reads}`, but `finetune` only trains text models", hint=OWN_LOOP
        )
    tokenizer = read_tokenizer(directory)
    check_complete(checkpoint, allow_missing=options.allow_missing)
    _check_weights(checkpoint, options)
    rows = with_template(read_rows(options), tokenizer)
    drawn = str((checkpoint.config.get("architectures") or [""])[0])
    check_guess(options, drawn, rows.label, rows.train[rows.label] if rows.label else ())
    task = find_task(checkpoint.config, options.task, has_labels=rows.label is not None)
    _check_head(checkpoint, options, task)
    _check_gates(options, task)
    check_labels(task.name, rows.label)
    config = transformers_config(checkpoint, hint="lpconv trains the models that the installed transformers opens")
    seq_len = sequence_length(config, options.seq_len)
    sizes = {"seq_len": seq_len, "vocab_size": vocabulary_size(config)}
    mask_id = special_id(tokenizer, "mask")
    if task.name == "mlm" and mask_id is None:
        raise UsageError(f"the tokenizer of `{directory.name}` has no mask token", hint="pass --task clm")
    before, after = special_tokens(tokenizer) if task.name == "mlm" else ([], [])
    if task.name == "classification":
        is_trained = "ForSequenceClassification" in drawn and config.num_labels > 1
        trained = [config.id2label[i] for i in range(config.num_labels)] if is_trained else []
        examples = classification(rows, tokenizer, **sizes, head=trained)
    elif task.name == "seq2seq":
        examples = sequence_pairs(rows, tokenizer, **sizes)
    else:
        answers_only = task.name == "clm" and not options.arithmetic.on_codes
        examples = pack_examples(
            rows, tokenizer, **sizes, prefix=before, suffix=after, answers_only=answers_only and rows.is_chat
        )
    if num_processes() > 1 and len(examples.held_out) < options.batch_size:
        raise InputError(
            f"{len(examples.held_out)} held-out examples do not fill a batch of {options.batch_size} over "
            f"{num_processes()} processes",
            hint="lower --batch-size, or pass more --eval-data",
        )
    pads = (special_id(tokenizer, "pad"), special_id(tokenizer, "eos"), 0)
    return TrainingJob(
        checkpoint=checkpoint,
        task=task,
        examples=examples,
        options=options,
        seq_len=seq_len,
        pad_id=next(p for p in pads if p is not None),
        mask_id=mask_id,
        keep=(len(before), len(after)),
        num_targets=len(examples.labels) or vocabulary_size(config),
        guess=rows.guess(task.name),
    )


def _check_weights(checkpoint: Checkpoint, options: FinetuneOptions) -> None:
    """Check, from headers alone, the rank of adapters, and that weights, gradients and optimizer fit in memory."""
    shapes = [*stored_shapes(checkpoint).values()]
    sizes = [*map(math.prod, shapes)]
    if rank := options.arithmetic.lora:
        widest = max((min(shape) for shape in shapes if len(shape) == 2), default=rank)
        if rank > widest:
            raise UsageError(f"--lora {rank} exceeds {widest}, the highest rank of a weight", hint="usual are 8 to 64")
        stored = sum(x.num_bytes for x in checkpoint.tensors.values())
        check_room({"weights": 4 * sum(sizes) if options.twin_arithmetic else stored}, options.max_memory)
        return
    needed = parameter_bytes(sum(sizes), max(sizes), options.arithmetic, num_ranks=num_ranks(options))
    check_room(needed, options.max_memory)


def _check_head(checkpoint: Checkpoint, options: FinetuneOptions, task: Task) -> None:
    """Raise UnsupportedError for tasks of adapters, and native models, that would need a new head."""
    drawn = (checkpoint.config.get("architectures") or [""])[0]
    if options.arithmetic.lora and task.name not in ("clm", "mlm"):
        raise UnsupportedError(
            f"--lora trains language models, not task {task.name}", hint="pass --task clm or mlm, or leave --lora out"
        )
    if options.arithmetic.is_native and task_of(drawn) is not task:
        raise UnsupportedError(
            f"`{drawn}` has no head for task {task.name}, and method native cannot add one",
            hint="leave --task out, or choose a recipe such as unit-fp8",
        )


def _check_gates(options: FinetuneOptions, task: Task) -> None:
    for gate in options.gates:
        if "accuracy" in gate and task.name != "classification" and not options.arithmetic.on_codes:
            raise UsageError(
                f"gate `{gate}` needs task classification, and this is task {task.name}", hint="use loss or loss_gap"
            )


def num_ranks(options: FinetuneOptions) -> int:
    """Number of processes that share the parameters."""
    return num_processes() if options.is_sharded else 1


def open_start(job: TrainingJob, seed: int) -> Opened:
    """The starting model of a run in fp32; for a sharded run, this rank's rows."""
    shared = mesh() if job.options.is_sharded else None
    rank = job.options.arithmetic.lora
    opened = open_to_train(
        job.task, job.checkpoint, seed=seed, num_labels=job.num_labels, mesh=shared, resident=rank > 0
    )
    if job.options.gradient_checkpointing:
        keep_only_inputs(opened.model)
    config = opened.model.config.get_text_config()
    if getattr(config, "pad_token_id", None) is None and job.task not in (CLM, MLM):  # windows need no padding
        config.pad_token_id = job.pad_id
    if job.recovery is not None:
        job.recovery.distillation.attach(opened.model)
    if rank:
        if opened.missing:
            raise UnsupportedError(
                f"the model lacks weights, which adapters do not train: {name_list(opened.missing)}",
                hint="choose another --task, or leave --lora out",
            )
        add_adapters(opened.model, rank, seed)
    return opened


def start_in_fp32(job: TrainingJob, seed: int) -> Any:
    """The starting model of a run, to compute in fp32; sharded over all ranks if the job is."""
    model = open_start(job, seed).model
    if job.options.is_sharded:
        shard(model, RECIPES["fp32"].arithmetic)
    return model


def first_batches(job: TrainingJob, stream: Stream, count: int, device: torch.device) -> list[dict[str, Any]]:
    size = job.options.batch_size
    starts = range(0, min(len(stream), count * size), size)
    batches = (job.collate([stream[i] for i in range(s, min(s + size, len(stream)))]) for s in starts)
    return [{k: v.to(device) for k, v in batch.items()} for batch in batches]


def check_run(options: FinetuneOptions) -> None:
    """Raise UsageError for options that conflict in this environment, UnsupportedError for impossible ones."""
    arithmetic = options.arithmetic
    if options.lca and arithmetic.is_scaled and arithmetic.variant is not None:
        raise UnsupportedError(
            f"--lca with recipe `{arithmetic.name}`: optimizer `{arithmetic.optimizer}` steps on the data of scaled "
            "weights, not on the model's parameters",
            hint="leave --lca out, or choose --optimizer adamw",
        )
    reason = _why_not_compiled(arithmetic)
    if options.compile and reason is not None:
        raise UnsupportedError(
            f"--compile with recipe `{arithmetic.name}`: {reason}", hint="leave --compile out, or choose another recipe"
        )
    if arithmetic.flag and num_processes() > 1:
        raise UnsupportedError(f"{arithmetic.flag} runs in one process", hint="start it without torchrun")
    if options.is_sharded:
        _check_sharded(options)
    if num_processes() > 1:
        _check_shared(options)
    for name in options.log_to:
        if name not in get_available_reporting_integrations():
            raise UnsupportedError(f"--log-to {name}: its package is not installed", hint=f"pip install {name}")


def _why_not_compiled(arithmetic: Arithmetic) -> str | None:
    """Why torch.compile would silently ignore a part of the recipe or cannot compile it, or None."""
    if arithmetic.loss_scale == "adaptive":
        return "its scales depend on values that compiled code cannot read"
    if arithmetic.precision == "fp16" and not torch.cuda.is_available():
        return "fp16 products on a CPU run in a dispatch mode (`lpconv.kernels.matmul`), which cannot be compiled"
    return None


def _check_shared(options: FinetuneOptions) -> None:
    if options.lca:
        raise UnsupportedError(
            f"--lca does not support {num_processes()} processes: each would repeat the same measurement",
            hint="run it with one process",
        )
    if options.batch_size % num_processes():
        raise UsageError(
            f"--batch-size {options.batch_size} cannot be divided among {num_processes()} processes",
            hint="it is the number of sequences per step over all processes",
        )


def _check_sharded(options: FinetuneOptions) -> None:
    if num_processes() == 1:
        raise UsageError(
            "--parallel fsdp2 needs more than one process",
            hint="start with torchrun: `torchrun --nproc-per-node 2 -m lpconv …`",
        )
    if options.compile:
        raise UnsupportedError("--compile with --parallel fsdp2 has not been tested", hint="leave one of them out")


def with_measured(job: TrainingJob) -> tuple[TrainingJob, tuple[InputRisk, ...]]:
    """The job with its objective and with "auto" replaced by layer names, and the measurements of those layers.

    The starting model runs forward on the first batches of the first seed. Raises as `find_objective` does.
    """
    options, objective = job.options, job.objective if job.recovery is None else Objective()
    is_auto = "auto" in options.critical and options.arithmetic.casts_operands
    chosen: tuple[InputRisk, ...] = ()
    if is_auto or objective is None:
        with quiet_transformers():
            model = start_in_fp32(job, options.seed).eval()
            batches = first_batches(job, job.stream(options.seed, held_out=False), MEASURED_BATCHES, model.device)
            objective = objective or find_objective(model, job.task, batches[0])
            if is_auto:
                chosen = critical_modules(input_risks(model, batches))
    critical = tuple(dict.fromkeys((*options.critical_patterns, *(r.layer for r in chosen))))
    options = dataclasses.replace(options, critical=critical)
    return dataclasses.replace(job, options=options, objective=objective), chosen
