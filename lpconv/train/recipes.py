"""How a run computes and what it stores: precision, method, optimizer and loss scale, combined as recipes.

Plain records; nothing here imports torch, so that `--help` and `--list-recipes` are fast.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge

from lpconv.errors import UsageError
from lpconv.formats.spec import OPERAND_BLOCKS, spellings
from lpconv.lookup import find
from lpconv.options import check, option, with_keywords
from lpconv.scaled.choices import FP4_SCALES, OPERAND_SCALES, USUAL_OPERAND_SCALE, operand_scales

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp4")
# Other names of precisions, and of the recipes that a format alone names.
_FLOATS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
PRECISION_SPELLINGS = spellings(_FLOATS | {"e4m3fn": "fp8", "e2m1": "fp4"})
RECIPE_SPELLINGS = spellings(_FLOATS | {"fp16": "amp-fp16", "e4m3fn": "unit-fp8", "e2m1": "nvfp4"})
_UNSCALED = {"fp8": ("mx",), "fp4": ("nvfp4", "ms-eden", "mx", "row")}  # operand scales without scaled tensors
TRAINING_METHODS = {
    "none": "no scales except the loss scale",
    "unit": "static power-of-two scales (Blake et al. 2023)",
    "scalify": "scales that propagate op by op (Balanca et al. 2024)",
    "native": "static scales by theory, for models from `lpconv init` (Blake et al. 2023)",
}
LOSS_SCALES = ("none", "dynamic", "logmax", "adaptive")  # or a number as text


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """A kind of AdamW. `variant` is the `lpconv.optim` variant for weights and moments, None for fp32 weights.

    `bytes_per_parameter` counts weight, gradient and state of one parameter trained in 16 bits. `needs_scales`: works
    only with scaled parameters.
    """

    bytes_per_parameter: int
    variant: str | None = None
    needs_scales: bool = False


# By what they store between steps.
TRAINING_OPTIMIZERS: dict[str, OptimizerChoice] = {
    # fp32 weights, or an fp32 copy; fp32 moments
    "adamw": OptimizerChoice(bytes_per_parameter=16),
    # an fp32 copy of the weights, moments in fp16 with a scale
    "fp16-state": OptimizerChoice(bytes_per_parameter=12, needs_scales=True),
    # weights rounded to fp16 at every step, fp32 moments
    "fp16-weights": OptimizerChoice(bytes_per_parameter=16),
    # bf16 weights, an fp32 copy, fp32 moments; and the same without the copy
    "fp32-master": OptimizerChoice(bytes_per_parameter=16, variant="fp32-master"),
    "fp32-moments": OptimizerChoice(bytes_per_parameter=12, variant="fp32-moments"),
    # pairs of bf16 for the weights; also for the second moment; for both moments. The rest is bf16
    "collage-light": OptimizerChoice(bytes_per_parameter=10, variant="light"),
    "collage-plus": OptimizerChoice(bytes_per_parameter=12, variant="plus"),
    "collage-full": OptimizerChoice(bytes_per_parameter=14, variant="full"),
    # bf16 and 8 bits for the weights; also 8 bits for the first moment. The rest is bf16
    "collage-int8": OptimizerChoice(bytes_per_parameter=9, variant="light-int8"),
    "collage-int8-moment": OptimizerChoice(bytes_per_parameter=8, variant="int8-moment"),
    # bf16 weights and moments, with the rounding error of the weights in the first moment
    "eco": OptimizerChoice(bytes_per_parameter=8, variant="eco"),
    # bf16 weights and moments; with stochastic rounding of weights; with Kahan compensation
    "bf16": OptimizerChoice(bytes_per_parameter=8, variant="bf16"),
    "bf16-sr": OptimizerChoice(bytes_per_parameter=8, variant="stochastic"),
    "bf16-kahan": OptimizerChoice(bytes_per_parameter=10, variant="kahan"),
}


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """A valid combination, made by `arithmetic`. `loss_scale` is a name in `LOSS_SCALES` or a number as text.

    `operand_scale` selects the scales at which operands are cast in scaled fp8 and fp4 (see
    `lpconv.scaled.choices.operand_scales`), or in blocks without scaled tensors. `operand_rounding` is the rounding of
    activations and gradients in fp8 without scales. `on_codes`: weights are trained on the grid of their stored codes,
    for `finetune --recover`. `lora` is the rank of adapters, which are trained in place of the weights, or 0.
    """

    precision: str = "bf16"
    method: str = "none"
    optimizer: str = "adamw"
    loss_scale: str = "none"
    loss_scale_floor: str | None = None
    operand_scale: str = USUAL_OPERAND_SCALE
    operand_rounding: str = "nearest"
    on_codes: bool = False
    lora: int = 0

    @property
    def variant(self) -> str | None:
        """The `lpconv.optim` variant that stores the weights; None if AdamW has them or a copy in fp32."""
        return TRAINING_OPTIMIZERS[self.optimizer].variant

    @property
    def is_scaled(self) -> bool:
        """Whether parameters and activations are scaled tensors."""
        return self.method != "none"

    @property
    def is_native(self) -> bool:
        """Whether scales come from theory, which holds for weights drawn by `lpconv init`."""
        return self.method == "native"

    @property
    def flag(self) -> str | None:
        """The option that trains something else than weights, if there is one."""
        return "--recover" if self.on_codes else "--lora" if self.lora else None

    def usual_lr(self, steps: int) -> float:
        """The default for the highest learning rate.

        For native scaling it is the step on unit weights. For recovery it is relative to the distance of neighbouring
        codes, and so small that a code moves only if its gradient rarely changes sign, as in AutoRound (Cheng et al.
        2023, arXiv 2309.05516).
        """
        if self.on_codes:
            return _RECOVERY_PATH / max(steps, _LEAST_STEPS)
        if self.lora:
            return _LORA_RATE
        return 0.25 if self.is_native else 5e-5

    @property
    def casts_operands(self) -> bool:
        """Whether scaled operands are cast to fewer than 16 bits."""
        return self.is_scaled and self.precision in ("fp8", "fp4")

    @property
    def has_blocks(self) -> bool:
        """Whether operands are cast in blocks along the summed axis, each with a scale."""
        return self.operand_scale in OPERAND_BLOCKS

    @property
    def name(self) -> str:
        """A short name that no other combination has, for titles."""
        if self.on_codes:
            return "recover" if self == RECOVERY else f"recover {self.precision}"
        if self.lora:
            return f"lora-{self.lora} {self.precision}"
        named = next((n for n, r in RECIPES.items() if r.arithmetic == self), None)
        if named is not None:
            return named
        is_fp4 = self.precision == "fp4"  # its usual operand scale is another one
        for field in ("operand_rounding", "loss_scale_floor", *(() if is_fp4 else ("operand_scale",))):
            usual = dataclasses.replace(self, **{field: getattr(Arithmetic, field)})
            if usual != self:
                prefix = "floor " if field == "loss_scale_floor" else ""
                return f"{usual.name} {prefix}{getattr(self, field)}"
        parts = (self.precision, self.method, self.optimizer, self.loss_scale, self.operand_scale if is_fp4 else "none")
        return " ".join(p for p in parts if p != "none")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    arithmetic: Arithmetic
    purpose: str


def _recipe(purpose: str, **parts: Any) -> Recipe:
    return Recipe(arithmetic=Arithmetic(**parts), purpose=purpose)


RECIPES: dict[str, Recipe] = {
    "fp32": _recipe("the reference", precision="fp32"),
    "amp-bf16": _recipe("autocast to bf16 with fp32 weights: today's usual choice"),
    "bf16": _recipe(
        "everything in bf16; small updates are lost, which Collage and bf16-sr avoid", optimizer="bf16"
    ),
    "bf16-sr": _recipe("everything in bf16, with stochastic rounding of weights", optimizer="bf16-sr"),
    "collage-bf16": _recipe(
        "bf16, with the rounding residual kept in a second bf16 number (Yu et al. 2024)", optimizer="collage-plus"
    ),
    "amp-fp16": _recipe(
        "autocast to fp16 with fp32 weights and GradScaler's rules (Micikevicius et al. 2018)",
        precision="fp16", loss_scale="dynamic",
    ),
    "adaptive-fp16": _recipe(
        "autocast to fp16 with a loss scale per layer (Zhao et al. 2019)", precision="fp16", loss_scale="adaptive"
    ),
    "unit-fp16": _recipe("unit scaling in fp16, no loss scale", precision="fp16", method="unit"),
    "mpt-fp8": _recipe(
        "e5m2 products, rounded stochastically, fp16 weights, a loss scale with a rising floor "
        "(Mellempudi et al. 2019)",
        precision="fp8", optimizer="fp16-weights", loss_scale="dynamic",
        loss_scale_floor="0:1,40000:8192,150000:32768", operand_rounding="stochastic",
    ),
    "mxfp8": _recipe(
        "autocast to bf16, with e4m3fn products in blocks of 32 (OCP Microscaling)", precision="fp8", operand_scale="mx"
    ),
    "nvfp4": _recipe(
        "autocast to bf16, with e2m1 products in blocks of 16, as TransformerEngine trains (NVIDIA 2025)",
        precision="fp4", operand_scale="nvfp4",
    ),
    "quartet2": _recipe(
        "as nvfp4, with unbiased products in the backward pass: Quartet II (Panferov et al. 2026)",
        precision="fp4", operand_scale="ms-eden",
    ),
    "mxfp4": _recipe(
        "autocast to bf16, with e2m1 products in blocks of 32 (OCP Microscaling)", precision="fp4", operand_scale="mx"
    ),
    "unit-fp8": _recipe(
        "unit scaling: e4m3fn products, one scale per row, no loss scale", precision="fp8", method="unit"
    ),
    "unit-nvfp4": _recipe(
        "unit scaling with the products of nvfp4", precision="fp4", method="unit", operand_scale="nvfp4"
    ),
    "scalify-fp8": _recipe(
        "Scalify: fp8 products, propagated scales, optimizer state in fp16",
        precision="fp8", method="scalify", optimizer="fp16-state",
    ),
    "unit-fp8-collage": _recipe(
        "unit-scaled weights kept as bf16 pairs: fp8 products without fp32 copies",
        precision="fp8", method="unit", optimizer="collage-plus",
    ),
    "native": _recipe(
        "native unit scaling from scratch in fp32: the reference for the next three", precision="fp32", method="native"
    ),
    "native-fp16": _recipe(
        "native unit scaling from scratch in fp16, no loss scale", precision="fp16", method="native"
    ),
    "native-fp8": _recipe(
        "native unit scaling from scratch: operands cast to fp8 directly, no loss scale",
        precision="fp8", method="native", operand_scale="static",
    ),
    "native-nvfp4": _recipe(
        "native unit scaling from scratch with the products of nvfp4, but no scale per tensor",
        precision="fp4", method="native", operand_scale="nvfp4-static",
    ),
}  # fmt: skip


_RECOVERY_PATH = 1.5  # learning rate times steps, in units of the distance of neighbouring codes
_LEAST_STEPS = 100  # in shorter runs, gradients keep their sign by chance
_LORA_RATE = 2e-4  # of QLoRA (Dettmers et al. 2023, table 9), for models of up to 13 B parameters
# Training that recovers what rounding to codes lost (docs/methods/recover.md).
RECOVERY = Arithmetic(precision="bf16", on_codes=True)

how = functools.partial(option, panel="Arithmetic")  # a panel of the help


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions:
    """A recipe, and replacements for its parts, for `arithmetic` to combine."""

    recipe: str | None = how(
        None,
        "One name that sets the options under Arithmetic (see --list-recipes)",
        default="unit-fp8",
        choices=RECIPES,
        spellings=RECIPE_SPELLINGS,
        panel=None,
    )
    recover: bool = how(
        False,
        "Train the scales or codes of an output of `lpconv convert` towards the predictions of its source, and "
        "publish it in the same form",
    )
    lora: int | None = how(
        None,
        "Train LoRA adapters of this rank next to weights that stay as stored, and publish them in PEFT's format",
        Ge(1),
        default="none",
    )
    precision: str | None = how(
        None,
        "Number format of matrix products",
        default="the recipe's",
        choices=PRECISIONS,
        spellings=PRECISION_SPELLINGS,
    )
    method: str | None = how(
        None, "Method for scaling tensors", default="the recipe's", choices=TRAINING_METHODS, short=("-m",)
    )
    optimizer: str | None = how(
        None,
        "Variant of AdamW, named after what it stores between steps",
        default="the recipe's",
        choices=TRAINING_OPTIMIZERS,
    )
    rounding: str | None = how(
        None,
        "How to round bf16 weights after a step or, in fp8 without scales, operands",
        default="the recipe's",
        choices=("nearest", "stochastic"),
    )
    loss_scale: str | None = how(
        None,
        f"Loss scale: {', '.join(LOSS_SCALES)} or a number",
        default="by precision and method",
        parse=str,
        given=str | float,
    )
    loss_scale_floor: str | None = how(
        None, "Smallest loss scale, as STEP:SCALE pairs such as 0:1,40000:8192", default="none", metavar="STEP:SCALE,…"
    )
    operand_scale: str | None = how(
        None,
        f"Scale of fp8 and fp4 operands: {', '.join({**OPERAND_SCALES, **FP4_SCALES})}; or one per kind of "
        "product, such as row,grad_weight=carrier",
        default="the recipe's, or static with --calibrate",
        metavar="KIND",
    )


@with_keywords(ArithmeticOptions)
def arithmetic(options: ArithmeticOptions) -> Arithmetic:
    """The requested combination: a recipe, parts, or a recipe with parts replaced; by default unit-fp8.

    `recover` and `lora` allow no other part than a precision of bf16 or fp32.
    Without a named loss scale, fp16 and unscaled fp8 use the dynamic one. Raises UsageError for unknown names and, with
    the reason, for invalid combinations.
    """
    check(options)
    asked = {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
    if asked.pop("recover"):
        return _with_precision(RECOVERY, asked)
    if rank := asked.pop("lora", 0):
        return _with_precision(Arithmetic(lora=rank), asked)
    if asked.keys() <= {"operand_scale"}:
        asked["recipe"] = "unit-fp8"
    recipe, rounding = asked.pop("recipe", None), asked.pop("rounding", None)
    if "operand_scale" in asked:
        asked["operand_scale"] = str(operand_scales(asked["operand_scale"]))
    base = Arithmetic() if recipe is None else find("recipe", recipe, RECIPES).arithmetic
    chosen = _with_operand_scale(dataclasses.replace(base, **asked), options.operand_scale)
    needs_loss_scale = not (chosen.is_scaled or chosen.has_blocks) and chosen.precision in ("fp16", "fp8")
    if recipe is None and options.loss_scale is None and needs_loss_scale:
        chosen = dataclasses.replace(chosen, loss_scale="dynamic")
    chosen = _with_rounding(chosen, rounding)
    _check_loss_scale(chosen)
    _check_optimizer(chosen)
    return chosen


def _with_precision(usual: Arithmetic, asked: dict[str, Any]) -> Arithmetic:
    """An arithmetic that no option but a precision can change. Raises UsageError if another one is given."""
    precision = asked.pop("precision", usual.precision)
    if asked:
        flag = "--" + next(iter(asked)).replace("_", "-")
        raise UsageError(f"{flag} does not apply to {usual.flag}", hint=f"leave {flag} out")
    if precision not in ("bf16", "fp32"):
        raise UsageError(f"{usual.flag} does not compute in {precision}", hint="pass --precision bf16 or fp32")
    return dataclasses.replace(usual, precision=precision)


def saved_as(arithmetic: Arithmetic) -> tuple[str, str]:
    """The published form of a run's weights and their format: a method of `lpconv convert`, or one of training."""
    if arithmetic.on_codes:
        return "recovered", "codes"
    if arithmetic.lora:
        return "adapter", "fp32"
    if arithmetic.optimizer.startswith("collage"):
        return "collage", "bf16"
    if arithmetic.is_scaled:
        # A native model is stored like any unit-scaled one; its config marks it as native.
        method = "unit" if arithmetic.is_native else arithmetic.method
        return method, {"fp8": "e4m3fn", "fp4": "bf16"}.get(arithmetic.precision, arithmetic.precision)
    return "plain", "bf16" if arithmetic.variant not in (None, "fp32-master") else "fp32"


def _with_operand_scale(chosen: Arithmetic, named: str | None) -> Arithmetic:
    """The usual operand scale for fp4 if none is named. Raises UsageError for scales that do not fit."""
    if chosen.precision == "fp4" and chosen.operand_scale == USUAL_OPERAND_SCALE and named is None:
        chosen = dataclasses.replace(chosen, operand_scale="nvfp4")
    has_scale = chosen.casts_operands or chosen.operand_scale in _UNSCALED.get(chosen.precision, ())
    usual = dataclasses.replace(chosen, operand_scale=Arithmetic.operand_scale)
    if named is not None and not has_scale:
        raise UsageError(
            f"recipe `{usual.name}` has no operand scale `{named}`",
            hint="use --operand-scale with a recipe such as unit-fp8",
        )
    if chosen.casts_operands:
        operand_scales(chosen.operand_scale).check(chosen.precision)
    return chosen if has_scale else usual


def _with_rounding(chosen: Arithmetic, rounding: str | None) -> Arithmetic:
    """Apply `--rounding`: how bf16 weights without a wider copy are written back, or how plain fp8 casts operands."""
    if rounding is None:
        return chosen
    keeps_bf16 = chosen.optimizer in ("bf16", "bf16-sr")
    if chosen.precision == "fp8" and not (chosen.is_scaled or chosen.has_blocks or keeps_bf16):
        return dataclasses.replace(chosen, operand_rounding=rounding)
    if rounding == ("stochastic" if chosen.optimizer == "bf16-sr" else "nearest"):
        return chosen
    if not keeps_bf16:
        raise UsageError(
            f"optimizer `{chosen.optimizer}` keeps more than bf16 weights, so {rounding} rounding does not apply",
            hint="use --rounding with --optimizer bf16, or with fp8 without scales",
        )
    return dataclasses.replace(chosen, optimizer="bf16-sr" if rounding == "stochastic" else "bf16")


def _check_loss_scale(setup: Arithmetic) -> None:
    scale = setup.loss_scale
    if scale not in LOSS_SCALES and not _is_scale(scale):
        raise UsageError(
            f"unknown loss scale `{scale}`", hint=f"use {', '.join(LOSS_SCALES)}, or a number such as 1024"
        )
    if setup.is_scaled and scale != "none":
        raise UsageError(
            f"method `{setup.method}` sets the scale of the backward pass itself, so a loss scale has no effect",
            hint="leave --loss-scale out, or use --method none",
        )
    if scale == "adaptive" and setup.precision not in ("fp16", "bf16"):
        raise UsageError(
            f"adaptive loss scaling needs fp16 or bf16 gradients, not {setup.precision}",
            hint="pass --precision fp16 or bf16",
        )
    if scale == "adaptive" and setup.variant is not None:
        raise UsageError(
            f"adaptive loss scaling needs fp32 weights, but optimizer `{setup.optimizer}` keeps bf16 weights",
            hint="pass --optimizer adamw",
        )
    if setup.loss_scale_floor is not None and scale not in ("dynamic", "logmax"):
        raise UsageError(
            f"loss scale `{scale}` does not support a floor", hint="use --loss-scale-floor with dynamic or logmax"
        )


def _is_scale(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _check_optimizer(setup: Arithmetic) -> None:
    chosen = TRAINING_OPTIMIZERS[setup.optimizer]
    if chosen.needs_scales and not setup.is_scaled:
        raise UsageError(
            f"optimizer `{setup.optimizer}` keeps moments at their parameter's scale, but method none has no scales",
            hint="pass --method unit or scalify, or --optimizer adamw",
        )
    if setup.optimizer == "fp16-weights" and setup.is_scaled:
        raise UsageError(
            f"optimizer `fp16-weights` needs unscaled weights, but method {setup.method} scales them",
            hint="pass --method none, or --optimizer fp16-state",
        )
    if chosen.variant is not None and setup.is_native:
        raise UsageError(
            f"native unit scaling updates unit-scale weights, which optimizer `{setup.optimizer}` does not support",
            hint="pass --optimizer adamw or fp16-state",
        )
    if chosen.variant is not None and setup.precision not in ("bf16", "fp8", "fp4"):
        raise UsageError(
            f"optimizer `{setup.optimizer}` needs bf16 weights, but a run in {setup.precision} has none",
            hint="pass --precision bf16 or fp8, or --optimizer adamw",
        )
