"""Options of `lpconv finetune`. Plain Python; nothing here reads a file."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt

from lpconv.data.texts import check_reads_text
from lpconv.errors import UnsupportedError, UsageError
from lpconv.options import (
    PARALLEL,
    AllowMissing,
    Force,
    Group,
    Resume,
    Revision,
    check,
    gate_option,
    option,
    size_option,
)
from lpconv.scaled.choices import LEARNING_RATES, NATIVE_MARK
from lpconv.train.recipes import (
    PRECISION_SPELLINGS,
    RECIPES,
    Arithmetic,
    ArithmeticOptions,
    arithmetic,
    how,
    saved_as,
)

TASKS = ("auto", "mlm", "clm", "classification", "seq2seq")
_SCHEDULES = ("linear", "cosine", "constant")
_TWINS = ("fp32", "bf16", "none")
_SAVES = ("converted", "plain")


# Services that Trainer can report to, by transformers' names; listed here because asking it takes seconds.
LOGGERS = (
    "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow", "neptune",
    "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip
# Those whose package has their name; Trainer knows about the others.
OWN_LOOP = "use lpconv.scaled and lpconv.optim in your own training loop"
OWN_PACKAGE = {"clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb"}
# Options by panel of the help; those with `panel=None` come first, in a panel that most people need.
_data = functools.partial(option, panel="Data")
_TRAINING = "Training"
_train = functools.partial(option, panel=_TRAINING)
_DIAGNOSTICS = "Twin and diagnostics"
_check = functools.partial(option, panel=_DIAGNOSTICS)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Settings of one run and its twin. Properties fill in intervals that are None."""

    arithmetic: Annotated[Arithmetic, Group(ArithmeticOptions, arithmetic)]
    critical: tuple[str, ...] = how(
        ("auto",),
        "Modules whose products stay in 16 bits under scaled fp8: a pattern such as '*.down_proj'; auto for those "
        "with large outliers, up to 10 % of the work; or none",
        default="auto",
        metavar="PATTERN",
    )
    calibrate: bool = how(False, "Set the static scales of method unit from the first batches", default="by theory")
    source: str | None = _data(
        None,
        "Source of the model, for --recover and the twin of --lora",
        default="the recorded source",
        metavar="MODEL",
        is_path=True,
    )
    task: str = _data("auto", "Training task", choices=TASKS, panel=None)
    data: str | None = _data(
        None,
        "Training data: a file (txt, jsonl, json, csv, tsv or parquet) or a data set on the hub",
        default="the sample text",
        panel=None,
        metavar="FILE",
        is_path=True,
    )
    eval_data: str | None = _data(None, "Evaluation data", default="a tenth of --data", metavar="FILE", is_path=True)
    text_column: str | None = _data(None, "Name of the text column", default="a column with a common name")
    label_column: str | None = _data(
        None, "Name of the column with classes or target texts", default="a column with a common name"
    )
    seq_len: int | None = _data(
        None, "Number of tokens per sequence", Ge(2), default="128, or the model's maximum", panel=None
    )
    steps: int = _train(100, "Number of optimizer steps", Ge(1), panel=None)
    batch_size: int = _train(
        8,
        "Number of sequences per forward pass, over all processes; also per step, unless --grad-accum",
        Ge(1),
        panel=None,
    )
    grad_accum: int = _train(
        1, "Number of batches per step, whose gradients are added up; saves memory over a larger batch", Ge(1)
    )
    gradient_checkpointing: bool = _train(
        False, "Keep only the input of each block, and compute it again in the backward pass, to save memory"
    )
    lr: float | None = _train(
        None,
        "Peak learning rate",
        Gt(0),
        default="5e-5; 2e-4 for --lora; 0.25 for native recipes; 1.5/steps of a code, at most 0.015, for --recover",
        example="5e-5",
        panel=None,
    )
    lr_rule: str | None = _train(
        None,
        "Rule for the learning rate of each parameter, for native recipes",
        default="u-mup",
        choices=LEARNING_RATES,
    )
    schedule: str = _train("linear", "Schedule of the learning rate after the warm-up", choices=_SCHEDULES)
    warmup: float = _train(0.1, "Warm-up from rate 0, as a fraction of all steps", Ge(0), Lt(1))
    weight_decay: float = _train(0.01, "Weight decay of AdamW", Ge(0))
    beta2: float = _train(0.999, "AdamW's beta2, the decay rate of the second moment", Ge(0), Lt(1), example="0.999")
    clip: float = _train(1.0, "Largest gradient norm, to which gradients are clipped; 0 for no clipping", Ge(0))
    seed: int = _train(0, "First seed", Ge(0))
    save_every: int | None = _train(
        None, "Save a checkpoint every N steps; 0 for none", Ge(0), default="about every ten minutes"
    )
    save: str = _train(
        "converted",
        "Save the model in its converted form, or as a plain checkpoint",
        what="form to save",
        choices=_SAVES,
    )
    compile: bool = _train(False, "Compile the model with torch.compile")
    max_memory: int | None = option(
        None,
        size_option(
            "Refuse to start if the estimated memory exceeds this, such as 8GB",
            default="the free memory",
            panel=_TRAINING,
            of_run=True,
        ),
    )
    parallel: str = _train(
        "ddp",
        "How torchrun's processes share the model: a copy each (ddp) or a part each (fsdp2)",
        what="kind of parallelism",
        only="command",  # torchrun starts processes, which jobs do not
        choices=PARALLEL,
    )
    log_to: tuple[str, ...] = _train(
        (),
        "Service to log to, as in Trainer's report_to",
        default="none",
        what="place to log to",
        choices=LOGGERS,
        of_run=True,
    )
    twin: str = _check(
        "fp32", "Precision of the twin, a second run to compare with", choices=_TWINS, spellings=PRECISION_SPELLINGS
    )
    seeds: int = _check(1, "Number of seeds, whose spread shows the noise", Ge(1))
    eval_every: int | None = _check(
        None,
        "Evaluate every N steps; 0 for only after the last step",
        Ge(0),
        default="every quarter of the run, at least 10 steps; only after the last step for --recover",
    )
    eval_batches: int = _check(16, "Largest number of batches per evaluation", Ge(1))
    check_gradients: bool = _check(
        True, "Before training with scaled tensors, compare their gradients in fp32 with the plain model's"
    )
    lca: bool = _check(False, "Measure how much each layer, and its rounding, changes the loss at every step")
    gates: tuple[str, ...] = option(
        (),
        gate_option(
            "Fail with exit code 5 unless this holds, such as 'loss_gap<=0.05'", kind="finetune", panel=_DIAGNOSTICS
        ),
    )
    revision: Revision = None
    allow_missing: AllowMissing = False
    resume: Resume = False
    force: Force = False

    @property
    def highest_lr(self) -> float:
        """`lr`, or the default for the arithmetic."""
        return self.arithmetic.usual_lr(self.steps) if self.lr is None else self.lr

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.grad_accum

    @property
    def critical_patterns(self) -> tuple[str, ...]:
        """The patterns in `critical` that name modules."""
        return tuple(p for p in self.critical if p not in ("auto", "none"))

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a part of the model."""
        return self.parallel == "fsdp2"

    @property
    def twin_arithmetic(self) -> Arithmetic | None:
        """The arithmetic of the twin: native for a native run, because rates have other effects elsewhere.

        A recovery has no twin: it is compared with the source. The twin of adapters are the same adapters.
        """
        if self.twin == "none" or self.arithmetic.on_codes:
            return None
        if self.arithmetic.is_native:
            return dataclasses.replace(RECIPES["native"].arithmetic, precision=self.twin)
        if self.arithmetic.lora:
            return dataclasses.replace(self.arithmetic, precision=self.twin)
        return RECIPES["fp32" if self.twin == "fp32" else "amp-bf16"].arithmetic

    @property
    def saved_form(self) -> tuple[str, str]:
        """The method and format of the published model; "plain" stores everything that training kept."""
        method, format = saved_as(self.arithmetic)
        return (method, format) if self.save == "converted" or method == "plain" else ("plain", "fp32")

    @property
    def eval_interval(self) -> int:
        """The interval of evaluations in steps; 0 is never."""
        part = 1 if self.arithmetic.on_codes else 4
        return max(10, self.steps // part) if self.eval_every is None else self.eval_every

    @property
    def update_interval(self) -> int:
        """The interval of records of updates in steps, at most all; 0 is never. Sharded tensors and codes have none."""
        return 0 if self.is_sharded or self.arithmetic.lora else min(self.steps, max(5, self.steps // 10))


_NOTHING_TO_CALIBRATE = {
    "none": "it has no static scales",
    "scalify": "its scales are set from data during training",
    "native": "its scales are fixed by theory",
}


def check_options(options: FinetuneOptions) -> None:
    """Raise UsageError for unknown names and numbers out of range."""
    check(options)
    if options.calibrate and options.arithmetic.method != "unit":
        raise UsageError(
            f"--calibrate with recipe `{options.arithmetic.name}`: {_NOTHING_TO_CALIBRATE[options.arithmetic.method]}",
            hint="leave --calibrate out, or choose --method unit",
        )
    if options.lr_rule is not None and not options.arithmetic.is_native:
        raise UsageError(
            f"--lr-rule with recipe `{options.arithmetic.name}`: all its parameters have the same learning rate",
            hint="leave --lr-rule out, or choose a recipe such as native-fp8",
        )
    if options.critical not in ((), ("auto",)) and not options.arithmetic.casts_operands:
        raise UsageError(
            f"--critical with recipe `{options.arithmetic.name}`: it has no scaled fp8 or fp4 products",
            hint="leave --critical out, or choose a recipe such as unit-fp8",
        )
    _check_parts(options)
    if options.eval_data is not None and options.data is None:
        raise UsageError("--eval-data needs --data", hint="pass both, or neither to use the sample text")
    if options.data is not None and Path(options.data).is_dir():
        raise UsageError(f"`{options.data}` is a directory", hint="pass one file to --data")


def _check_parts(options: FinetuneOptions) -> None:
    """Raise UsageError for options that do not fit together with or without --recover and --lora."""
    flag = options.arithmetic.flag
    if flag is None:
        if options.source is not None:
            raise UsageError("--source only applies to --recover and --lora", hint="leave --source out")
        return
    if options.task not in ("auto", "clm", "mlm"):
        raise UsageError(f"{flag} does not support task {options.task}", hint="it trains language models")
    defaults = {f.name: f.default for f in dataclasses.fields(FinetuneOptions)}
    # The model of a recovery is in evaluation mode, in which transformers checkpoints nothing.
    others = ("twin", "weight_decay", "gradient_checkpointing") if options.arithmetic.on_codes else ("save",)
    given = {n for n in ("lca", "compile", "parallel", *others) if getattr(options, n) != defaults[n]}
    wrong = next(iter(sorted(given - ({"twin"} if options.twin == "none" else set()))), None)
    if wrong is not None:
        name = "--" + wrong.replace("_", "-")
        raise UsageError(f"{name} does not apply to {flag}", hint=f"leave {name} out")


def task_in(config: Mapping[str, Any], task: str) -> str:
    """The task, or for "auto" the one that needs labels if a config says so without transformers; else "auto"."""
    drawn = str((config.get("architectures") or [""])[0])
    if task != "auto":
        return task
    if drawn.endswith("ForSequenceClassification"):
        return "classification"
    writes = config.get("is_encoder_decoder") is True and "num_mel_bins" not in config
    return "seq2seq" if writes and drawn.endswith(("ForConditionalGeneration", "MTModel")) else "auto"


def not_planned(task: str) -> UnsupportedError:
    return UnsupportedError(
        f"--dry-run cannot estimate the memory of task {task}, whose batches depend on the data",
        hint="leave --dry-run out, or pass a language model",
    )


def check_start(options: FinetuneOptions, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a model that reads no text, and a native recipe without weights of `lpconv init`."""
    check_reads_text(config, hint=OWN_LOOP, allow_pairs=True)
    if options.arithmetic.is_native and NATIVE_MARK not in config:
        raise UnsupportedError(
            f"recipe `{options.arithmetic.name}` uses static scales that only hold for weights from `lpconv init`, "
            "not for trained ones",
            hint="use a recipe such as unit-fp8, or draw new weights with `lpconv init MODEL --reinit`",
        )
