"""Options of `lpconv advise`. Plain Python."""

import functools
import math
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt

from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.options import AllowMissing, Force, Revision, check, option, parse_size
from lpconv.train.options import TASKS, FinetuneOptions, check_options
from lpconv.train.recipes import RECIPES, Arithmetic

ADVICE_FILE = "advice.json"  # in an output; marks the folder as an advice
# Hint for models without text.
NO_TEXT = "use `lpconv convert MODEL --verify logits` to measure what a conversion changes in its outputs"
RUNTIMES = ("vllm", "llama.cpp", "mlx", "transformers")  # as the layouts' schemes name their readers
_PURPOSES = ("infer", "train", "both", *RUNTIMES)
_train = functools.partial(option, panel="The training to advise on")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on the loss of quality, on memory, and on the time of measurements.

    `quality` is the largest gap: in nats for a loss, relative for outputs. `memory_bytes` is for one step.
    """

    quality: float = 0.01
    memory_bytes: int | None = None
    minutes: float = 10.0


def parse_budget(text: str) -> Budget:
    """Parse ``quality=0.01,memory=8GB,minutes=5`` or some of these. Raises UsageError for other keys and values."""
    limits: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--budget {part}: expected NAME=VALUE", hint="for example minutes=5, or quality=0.02")
        field = find("part of a budget", key, {"quality": "quality", "memory": "memory_bytes", "minutes": "minutes"})
        limits[field] = parse_size(value) if key == "memory" else _positive(key, value)
    return Budget(**limits)


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"--budget {key}={text}: expected a number above 0", hint=f"for example {key}=0.01")
    return value


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    """Options of `lpconv advise`, including the settings of its training runs."""

    purpose: str = option(
        "both",
        "What the model is for; a runtime restricts the conversions to those that it opens",
        flag="for",
        what="purpose",
        choices=_PURPOSES,
    )
    data: str | None = option(
        None,
        "File (txt, jsonl, json, csv, tsv or parquet) with text like the model will see in use",
        default="the sample text",
        metavar="FILE",
        is_path=True,
    )
    budget: Budget = option(
        Budget(),
        "Limits: quality= (added loss in nats, or relative error), memory= (of a step), minutes= (of measuring)",
        default="quality=0.01,minutes=10",
        metavar="KEY=VALUE,…",
        parse=parse_budget,
    )
    bits: float | None = option(
        None, "Average bits per weight, entropy-coded and chosen for each part", default="any", example="4.5"
    )
    batch_size: int = option(8, "Number of sequences per step", Ge(1))
    seq_len: int | None = option(None, "Number of tokens per sequence", Ge(2), default="128, or the model's maximum")
    task: str = _train("auto", "Training task", choices=TASKS)
    steps: int = _train(FinetuneOptions.steps, "Number of optimizer steps", Ge(1))
    lr: float = _train(Arithmetic().usual_lr(FinetuneOptions.steps), "Peak learning rate", Gt(0), example="5e-5")
    seed: int = option(0, "Seed of token masks and of the first run", Ge(0))
    revision: Revision = None
    allow_missing: AllowMissing = False
    force: Force = False

    @property
    def purposes(self) -> tuple[str, ...]:
        """The requested purposes, one by one."""
        return ("infer", "train") if self.purpose == "both" else ("train",) if self.purpose == "train" else ("infer",)

    @property
    def runtime(self) -> str | None:
        """The runtime that must open the conversion, or None for any."""
        return self.purpose if self.purpose in RUNTIMES else None

    def training(self, recipe: str, *, steps: int) -> FinetuneOptions:
        """Options of a training run with a recipe: without checkpoints, and evaluated only at the end.

        Runs shorter than the training are also evaluated in the middle.
        """
        return FinetuneOptions(
            arithmetic=RECIPES[recipe].arithmetic,
            task=self.task,
            data=self.data,
            seq_len=self.seq_len,
            steps=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            seed=self.seed,
            save_every=0,
            eval_every=steps if steps == self.steps else max(1, steps // 2),
        )


def check_advise(options: AdviseOptions) -> None:
    """Raise UsageError for unknown names and numbers out of range."""
    check(options)
    if options.runtime is not None and options.bits is not None:
        raise UsageError(
            f"--bits writes lpconv's own layout, which {options.runtime} does not open",
            hint="leave out --bits, or pass --for infer",
        )
    if "train" in options.purposes:
        check_options(options.training("fp32", steps=options.steps))
