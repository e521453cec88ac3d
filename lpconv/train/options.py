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
    Option,
    Resume,
    Revision,
    check,
    gate_option,
    size_option,
)
from lpconv.scaled.choices import FP4_SCALES, LEARNING_RATES, NATIVE_MARK, OPERAND_SCALES
from lpconv.train.recipes import (
    LOSS_SCALES,
    PRECISION_SPELLINGS,
    PRECISIONS,
    RECIPE_SPELLINGS,
    RECIPES,
    TRAINING_METHODS,
    TRAINING_OPTIMIZERS,
    Arithmetic,
    arithmetic,
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
_how = functools.partial(Option, panel="Arithmetic")
_data = functools.partial(Option, panel="Data")
_TRAINING = "Training"
_train = functools.partial(Option, panel=_TRAINING)
_DIAGNOSTICS = "Twin and diagnostics"
_check = functools.partial(Option, panel=_DIAGNOSTICS)


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions:
    """A recipe, and replacements for its parts; `lpconv.train.recipes.arithmetic` combines them."""

    recipe: Annotated[
        str | None,
        _how(
            "One name that sets the options under Arithmetic (see --list-recipes)",
            default="unit-fp8",
            choices=RECIPES,
            spellings=RECIPE_SPELLINGS,
            panel=None,
        ),
    ] = None
    recover: Annotated[
        bool,
        _how(
            "Train the scales or codes of an output of `lpconv convert` towards the predictions of its source, and "
            "publish it in the same form",
        ),
    ] = False
    lora: Annotated[
        int | None,
        Ge(1),
        _how(
            "Train LoRA adapters of this rank next to weights that stay as stored, and publish them in PEFT's format",
            default="none",
        ),
    ] = None
    precision: Annotated[
        str | None,
        _how(
            "Number format of matrix products",
            default="the recipe's",
            choices=PRECISIONS,
            spellings=PRECISION_SPELLINGS,
        ),
    ] = None
    method: Annotated[
        str | None, _how("Method for scaling tensors", default="the recipe's", choices=TRAINING_METHODS, short=("-m",))
    ] = None
    optimizer: Annotated[
        str | None,
        _how(
            "Variant of AdamW, named after what it stores between steps",
            default="the recipe's",
            choices=TRAINING_OPTIMIZERS,
        ),
    ] = None
    rounding: Annotated[
        str | None,
        _how(
            "How to round bf16 weights after a step or, in fp8 without scales, operands",
            default="the recipe's",
            choices=("nearest", "stochastic"),
        ),
    ] = None
    loss_scale: Annotated[
        str | None,
        _how(
            f"Loss scale: {', '.join(LOSS_SCALES)} or a number",
            default="by precision and method",
            parse=str,
            given=str | float,
        ),
    ] = None
    loss_scale_floor: Annotated[
        str | None,
        _how("Smallest loss scale, as STEP:SCALE pairs such as 0:1,40000:8192", default="none", metavar="STEP:SCALE,…"),
    ] = None
    operand_scale: Annotated[
        str | None,
        _how(
            f"Scale of fp8 and fp4 operands: {', '.join({**OPERAND_SCALES, **FP4_SCALES})}; or one per kind of "
            "product, such as row,grad_weight=carrier",
            default="the recipe's, or static with --calibrate",
            metavar="KIND",
        ),
    ] = None


def _arithmetic(asked: ArithmeticOptions) -> Arithmetic:
    check(asked)
    return arithmetic(**dataclasses.asdict(asked))


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Settings of one run and its twin. Intervals that are None are filled in by `every`."""

    arithmetic: Annotated[Arithmetic, Group(ArithmeticOptions, _arithmetic)]
    critical: Annotated[
        tuple[str, ...],
        _how(
            "Modules whose products stay in 16 bits under scaled fp8: a pattern such as '*.down_proj'; auto for those "
            "with large outliers, up to 10 % of the work; or none",
            default="auto",
            metavar="PATTERN",
        ),
    ] = ("auto",)
    calibrate: Annotated[
        bool, _how("Set the static scales of method unit from the first batches", default="by theory")
    ] = False
    source: Annotated[
        str | None,
        _data(
            "Source of the model, for --recover and the twin of --lora",
            default="the recorded source",
            metavar="MODEL",
            is_path=True,
        ),
    ] = None
    task: Annotated[str, _data("Training task", choices=TASKS, panel=None)] = "auto"
    data: Annotated[
        str | None,
        _data(
            "Training data: a file (txt, jsonl, json, csv, tsv or parquet) or a data set on the hub",
            default="the sample text",
            panel=None,
            metavar="FILE",
            is_path=True,
        ),
    ] = None
    eval_data: Annotated[
        str | None, _data("Evaluation data", default="a tenth of --data", metavar="FILE", is_path=True)
    ] = None
    text_column: Annotated[str | None, _data("Name of the text column", default="a column with a common name")] = None
    label_column: Annotated[
        str | None, _data("Name of the column with classes or target texts", default="a column with a common name")
    ] = None
    seq_len: Annotated[
        int | None, Ge(2), _data("Number of tokens per sequence", default="128, or the model's maximum", panel=None)
    ] = None
    steps: Annotated[int, Ge(1), _train("Number of optimizer steps", panel=None)] = 100
    batch_size: Annotated[
        int,
        Ge(1),
        _train(
            "Number of sequences per forward pass, over all processes; also per step, unless --grad-accum", panel=None
        ),
    ] = 8
    grad_accum: Annotated[
        int, Ge(1), _train("Number of batches per step, whose gradients are added up; saves memory over a larger batch")
    ] = 1
    gradient_checkpointing: Annotated[
        bool, _train("Keep only the input of each block, and compute it again in the backward pass, to save memory")
    ] = False
    lr: Annotated[
        float | None,
        Gt(0),
        _train(
            "Peak learning rate",
            default="5e-5; 2e-4 for --lora; 0.25 for native recipes; 1.5/steps of a code, at most 0.015, for --recover",
            example="5e-5",
            panel=None,
        ),
    ] = None
    lr_rule: Annotated[
        str | None,
        _train(
            "Rule for the learning rate of each parameter, for native recipes", default="u-mup", choices=LEARNING_RATES
        ),
    ] = None
    schedule: Annotated[str, _train("Schedule of the learning rate after the warm-up", choices=_SCHEDULES)] = "linear"
    warmup: Annotated[float, Ge(0), Lt(1), _train("Warm-up from rate 0, as a fraction of all steps")] = 0.1
    weight_decay: Annotated[float, Ge(0), _train("Weight decay of AdamW")] = 0.01
    beta2: Annotated[
        float, Ge(0), Lt(1), _train("AdamW's beta2, the decay rate of the second moment", example="0.999")
    ] = 0.999
    clip: Annotated[
        float, Ge(0), _train("Largest gradient norm, to which gradients are clipped; 0 for no clipping")
    ] = 1.0
    seed: Annotated[int, Ge(0), _train("First seed")] = 0
    save_every: Annotated[
        int | None, Ge(0), _train("Save a checkpoint every N steps; 0 for none", default="about every ten minutes")
    ] = None
    save: Annotated[
        str,
        _train("Save the model in its converted form, or as a plain checkpoint", what="form to save", choices=_SAVES),
    ] = "converted"
    compile: Annotated[bool, _train("Compile the model with torch.compile")] = False
    max_memory: Annotated[
        int | None,
        size_option(
            "Refuse to start if the estimated memory exceeds this, such as 8GB",
            default="the free memory",
            panel=_TRAINING,
            of_run=True,
        ),
    ] = None
    parallel: Annotated[
        str,
        _train(
            "How torchrun's processes share the model: a copy each (ddp) or a part each (fsdp2)",
            what="kind of parallelism",
            only="command",  # torchrun starts processes, which jobs do not
            choices=PARALLEL,
        ),
    ] = "ddp"
    log_to: Annotated[
        tuple[str, ...],
        _train(
            "Service to log to, as in Trainer's report_to",
            default="none",
            what="place to log to",
            choices=LOGGERS,
            of_run=True,
        ),
    ] = ()
    twin: Annotated[
        str,
        _check("Precision of the twin, a second run to compare with", choices=_TWINS, spellings=PRECISION_SPELLINGS),
    ] = "fp32"
    seeds: Annotated[int, Ge(1), _check("Number of seeds, whose spread shows the noise")] = 1
    eval_every: Annotated[
        int | None,
        Ge(0),
        _check(
            "Evaluate every N steps; 0 for only after the last step",
            default="every quarter of the run, at least 10 steps; only after the last step for --recover",
        ),
    ] = None
    eval_batches: Annotated[int, Ge(1), _check("Largest number of batches per evaluation")] = 16
    track_every: Annotated[
        int | None,
        Ge(0),
        _check("Record underflow every N steps; 0 for never", default="every tenth of the run, at least 5 steps"),
    ] = None
    check_gradients: Annotated[
        bool,
        _check("Before training with scaled tensors, compare their gradients in fp32 with the plain model's"),
    ] = True
    lca: Annotated[bool, _check("Measure how much each layer, and its rounding, changes the loss at every step")] = (
        False
    )
    gates: Annotated[
        tuple[str, ...],
        gate_option(
            "Fail with exit code 5 unless this holds, such as 'loss_gap<=0.05'", kind="finetune", panel=_DIAGNOSTICS
        ),
    ] = ()
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

    def every(self, what: str) -> int:
        """The interval of "eval" or "track" in steps; 0 is never. Sharded tensors and codes cannot be tracked."""
        if what == "track" and (self.is_sharded or self.arithmetic.lora):
            return 0
        asked: int | None = getattr(self, f"{what}_every")
        part, least = _INTERVALS[what]
        if what == "eval" and self.arithmetic.on_codes:
            part = 1
        return max(least, self.steps // part) if asked is None else asked


_NOTHING_TO_CALIBRATE = {
    "none": "it has no static scales",
    "scalify": "its scales are set from data during training",
    "native": "its scales are fixed by theory",
}
_INTERVALS = {"eval": (4, 10), "track": (10, 5)}  # (part of all steps, minimum number of steps)


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
    given = {n for n in ("lca", "compile", "parallel", "track_every", *others) if getattr(options, n) != defaults[n]}
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
