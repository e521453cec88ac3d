"""Options of `lpconv finetune`. Plain Python; nothing here reads a file."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt

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
from lpconv.scaled.choices import LEARNING_RATES, NATIVE_MARK, OPERAND_SCALES
from lpconv.train.recipes import (
    LOSS_SCALES,
    PRECISIONS,
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
# Options by panel of the help; those with `panel=None` come first, in a panel that most people need.
_how = functools.partial(Option, panel="Arithmetic")
_data = functools.partial(Option, panel="Data")
_TRAINING = "Training"
_train = functools.partial(Option, panel=_TRAINING)
_check = functools.partial(Option, panel="Twin and diagnostics")


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions:
    """A recipe, and replacements for its parts; `lpconv.train.recipes.arithmetic` combines them."""

    recipe: Annotated[
        str | None,
        _how(
            "Named combination of the options under Arithmetic, each of which replaces a part (see --list-recipes)",
            default="unit-fp8",
            choices=RECIPES,
            panel=None,
        ),
    ] = None
    precision: Annotated[
        str | None,
        _how("Format of matrix products", default="the recipe's", choices=PRECISIONS),
    ] = None
    method: Annotated[
        str | None, _how("Method that scales tensors", default="the recipe's", choices=TRAINING_METHODS, short=("-m",))
    ] = None
    optimizer: Annotated[
        str | None,
        _how("AdamW, named by what it keeps between steps", default="the recipe's", choices=TRAINING_OPTIMIZERS),
    ] = None
    rounding: Annotated[
        str | None,
        _how(
            "Rounding of bf16 weights as they are written back or, in fp8 without scales, of operands",
            default="the recipe's",
            choices=("nearest", "stochastic"),
        ),
    ] = None
    loss_scale: Annotated[
        str | None,
        _how(
            f"Loss scale: {', '.join(LOSS_SCALES)} or a number",
            default="what precision and method need",
            parse=str,
            given=str | float,
        ),
    ] = None
    loss_scale_floor: Annotated[
        str | None,
        _how("Smallest loss scale from each step on, such as 0:1,40000:8192", default="none", metavar="STEP:SCALE,…"),
    ] = None
    operand_scale: Annotated[
        str | None,
        _how(
            f"Scale at which scaled fp8 casts operands: {', '.join(OPERAND_SCALES)}; or one by product, such as "
            "row,grad_weight=carrier",
            default="the recipe's, or static with --calibrate",
            metavar="KIND",
        ),
    ] = None


def _arithmetic(asked: ArithmeticOptions) -> Arithmetic:
    return arithmetic(**dataclasses.asdict(asked))


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Settings of one run and its twin. Intervals that are None are filled in by `every`."""

    arithmetic: Annotated[Arithmetic, Group(ArithmeticOptions, _arithmetic)]
    critical: Annotated[
        tuple[str, ...],
        _how(
            "Pattern of modules whose products stay in 16 bits under scaled fp8, such as '*.down_proj'; auto for those "
            "whose measured inputs need it, up to 10 % of the work; or none",
            default="auto",
            metavar="PATTERN",
        ),
    ] = ("auto",)
    calibrate: Annotated[
        bool, _how("Measure the static scales of method unit on the first batches", default="from theory")
    ] = False
    task: Annotated[str, _data("Task that the model is trained for", choices=TASKS)] = "auto"
    data: Annotated[
        str | None,
        _data(
            "File (txt, jsonl, json, csv, tsv or parquet) or data set on the hub to train on",
            default="the sample text",
            panel=None,
            metavar="FILE",
            is_path=True,
        ),
    ] = None
    eval_data: Annotated[
        str | None, _data("Held-out data", default="a tenth of the data", metavar="FILE", is_path=True)
    ] = None
    text_column: Annotated[str | None, _data("Column of texts", default="one with a usual name")] = None
    label_column: Annotated[str | None, _data("Column of classes or targets", default="one with a usual name")] = None
    seq_len: Annotated[
        int | None, Ge(2), _data("Number of tokens in a sequence", default="128, or the model's maximum")
    ] = None
    steps: Annotated[int, Ge(1), _train("Number of optimizer steps", panel=None)] = 100
    batch_size: Annotated[int, Ge(1), _train("Number of sequences in a step, over all processes")] = 8
    lr: Annotated[
        float | None,
        Gt(0),
        _train(
            "Highest learning rate",
            default="5e-5; for native recipes 0.25, a step on unit weights",
            example="5e-5",
        ),
    ] = None
    lr_rule: Annotated[
        str | None,
        _train("Rule that gives each parameter of a native recipe its rate", default="u-mup", choices=LEARNING_RATES),
    ] = None
    schedule: Annotated[str, _train("Schedule of the learning rate after the warm-up", choices=_SCHEDULES)] = "linear"
    warmup: Annotated[float, Ge(0), Lt(1), _train("Warm-up, as a fraction of all steps")] = 0.1
    weight_decay: Annotated[float, Ge(0), _train("Decoupled weight decay")] = 0.01
    beta2: Annotated[float, Ge(0), Lt(1), _train("Decay of the second moment", example="0.999")] = 0.999
    clip: Annotated[float, Ge(0), _train("Norm that gradients are clipped to; 0 for no clipping")] = 1.0
    seed: Annotated[int, Ge(0), _train("First seed")] = 0
    save_every: Annotated[
        int | None, Ge(0), _train("Number of steps between checkpoints; 0 for none", default="ten minutes' worth")
    ] = None
    save: Annotated[str, _train("Form of the saved model", what="form to save", choices=_SAVES)] = "converted"
    compile: Annotated[bool, _train("Train through torch.compile")] = False
    max_memory: Annotated[
        int | None,
        size_option(
            "Largest estimated memory of a run that is begun, such as 8GB",
            default="what is free",
            panel=_TRAINING,
            of_run=True,
        ),
    ] = None
    parallel: Annotated[
        str,
        _train(
            "Sharing of the model among torchrun's processes: a copy each, or a part each",
            what="kind of parallelism",
            only="command",  # torchrun starts processes, which jobs do not
            choices=PARALLEL,
        ),
    ] = "ddp"
    log_to: Annotated[
        tuple[str, ...],
        _train("Service that Trainer reports to", default="none", what="place to log to", choices=LOGGERS, of_run=True),
    ] = ()
    twin: Annotated[str, _check("Precision of the twin that the run is compared with", choices=_TWINS)] = "fp32"
    seeds: Annotated[int, Ge(1), _check("Number of seeds; their spread is the noise", panel=None)] = 1
    eval_every: Annotated[
        int | None,
        Ge(0),
        _check(
            "Number of steps between evaluations; 0 for the last only",
            default="a quarter of the steps, at least 10",
        ),
    ] = None
    eval_batches: Annotated[int, Ge(1), _check("Largest number of batches in an evaluation")] = 16
    track_every: Annotated[
        int | None,
        Ge(0),
        _check(
            "Number of steps between records of underflow; 0 for none",
            default="a tenth of the steps, at least 5",
        ),
    ] = None
    check_gradients: Annotated[
        bool,
        _check("Compare the gradients of one sequence with the plain model's, in fp32, before scaled tensors train"),
    ] = True
    lca: Annotated[
        bool, _check("Allocate the loss change of every step to layers, and show what rounding took of it")
    ] = False
    gates: Annotated[
        tuple[str, ...],
        gate_option("Fail with exit code 5 unless this holds, such as 'loss_gap<=0.05'", kind="finetune"),
    ] = ()
    revision: Revision = None
    allow_missing: AllowMissing = False
    resume: Resume = False
    force: Force = False

    @property
    def highest_lr(self) -> float:
        """`lr`, or the default for the arithmetic."""
        return self.arithmetic.usual_lr if self.lr is None else self.lr

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
        """The arithmetic of the twin: native for a native run, because rates have other effects elsewhere."""
        if self.twin == "none":
            return None
        if self.arithmetic.is_native:
            return dataclasses.replace(RECIPES["native"].arithmetic, precision=self.twin)
        return RECIPES["fp32" if self.twin == "fp32" else "amp-bf16"].arithmetic

    @property
    def saved_form(self) -> tuple[str, str]:
        """The method and format of the published model; "plain" stores everything that training kept."""
        method, format = saved_as(self.arithmetic)
        return (method, format) if self.save == "converted" or method == "plain" else ("plain", "fp32")

    def every(self, what: str) -> int:
        """The interval of "eval" or "track" in steps; 0 is never. Sharded tensors cannot be tracked."""
        if what == "track" and self.is_sharded:
            return 0
        asked: int | None = getattr(self, f"{what}_every")
        part, least = _INTERVALS[what]
        return max(least, self.steps // part) if asked is None else asked


_NOTHING_TO_CALIBRATE = {
    "none": "it has no static scales",
    "scalify": "its scales are reset by data while it trains",
    "native": "its scales are those of theory",
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
            f"--lr-rule with recipe `{options.arithmetic.name}`: its parameters have one rate",
            hint="leave --lr-rule out, or choose a recipe such as native-fp8",
        )
    if options.critical not in ((), ("auto",)) and not options.arithmetic.is_scaled_fp8:
        raise UsageError(
            f"--critical with recipe `{options.arithmetic.name}`: it has no scaled fp8 products to leave out",
            hint="leave --critical out, or choose a recipe such as unit-fp8",
        )
    if options.eval_data is not None and options.data is None:
        raise UsageError("--eval-data without --data", hint="pass both, or neither for the embedded text")
    if options.data is not None and Path(options.data).is_dir():
        raise UsageError(f"`{options.data}` is a directory", hint="pass one file to --data")


def check_start(options: FinetuneOptions, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a native recipe on a model that `lpconv init` did not draw."""
    if options.arithmetic.is_native and NATIVE_MARK not in config:
        raise UnsupportedError(
            f"recipe `{options.arithmetic.name}` scales by theory, which holds for weights that `lpconv init` drew, "
            "not for trained ones",
            hint="recipes such as unit-fp8 train a model as it is; `lpconv init MODEL --reinit` draws it anew",
        )
