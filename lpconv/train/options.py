"""What a fine-tuning run is asked for. Plain Python; nothing here reads a file."""

from dataclasses import dataclass
from pathlib import Path

from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.train.recipes import Arithmetic

__all__ = ["SAVES", "SCHEDULES", "TASKS", "TWINS", "FinetuneOptions", "check_options"]

TASKS = ("auto", "mlm", "clm", "classification", "seq2seq")
SCHEDULES = ("linear", "cosine", "constant")
TWINS = ("fp32", "bf16", "none")
SAVES = ("converted", "plain")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Settings of one run and its twin.

    `data` is a file (txt, jsonl, json, csv, tsv, parquet), a hub id, or None for the text that ships with lpconv;
    `eval_data` the held-out part, by default split off. `batch_size` counts sequences of a step over all processes,
    `seq_len` tokens. `seeds` runs begin at `seed`. `warmup` is a share of the steps. Every `eval_every`-th step is
    evaluated on `eval_batches` batches at most, every `save_every`-th saved, every `track_every`-th recorded, by
    default a quarter, a fifth and a tenth of the steps (at least 5); 0 is never (the last step is always evaluated).
    `lca` allots the loss change of every step of the first run to its layers. `calibrate` measures the static scales of
    the method unit on a run's first batches. Modules whose name matches a pattern of `critical` keep 16-bit products
    in scaled fp8. `gates` are conditions on the result.
    """

    arithmetic: Arithmetic
    task: str = "auto"
    data: str | None = None
    eval_data: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    steps: int = 100
    batch_size: int = 8
    seq_len: int | None = None
    lr: float = 5e-5
    schedule: str = "linear"
    warmup: float = 0.1
    weight_decay: float = 0.01
    beta2: float = 0.999
    clip: float = 1.0
    seed: int = 0
    seeds: int = 1
    twin: str = "fp32"
    eval_every: int | None = None
    eval_batches: int = 16
    save_every: int | None = None
    track_every: int | None = None
    lca: bool = False
    calibrate: bool = False
    critical: tuple[str, ...] = ()
    save: str = "converted"
    log_to: tuple[str, ...] = ()
    compile: bool = False
    max_memory: int | None = None
    gates: tuple[str, ...] = ()
    revision: str | None = None
    resume: bool = False
    force: bool = False

    def every(self, what: str) -> int:
        """The interval of "eval", "save" or "track" in steps; 0 is never."""
        asked: int | None = getattr(self, f"{what}_every")
        part, least = _INTERVALS[what]
        return max(least, self.steps // part) if asked is None else asked


_NOTHING_TO_CALIBRATE = {
    "none": "it has no static scales",
    "scalify": "its scales are reset by data while it trains",
}
_INTERVALS = {"eval": (4, 1), "save": (5, 1), "track": (10, 5)}  # a part of the steps, but at least so many


def check_options(options: FinetuneOptions) -> None:
    """Raises UsageError for names that are unknown and numbers out of range."""
    for what, name, known in (
        ("task", options.task, TASKS),
        ("schedule", options.schedule, SCHEDULES),
        ("twin", options.twin, TWINS),
        ("form to save", options.save, SAVES),
    ):
        find(what, name, dict.fromkeys(known))
    if not 0 < options.lr < float("inf"):
        raise UsageError(f"--lr {options.lr} is no learning rate", hint="such as 5e-5")
    if not 0 <= options.beta2 < 1:
        raise UsageError(f"--beta2 {options.beta2} is out of range", hint="0 or more and below 1")
    if not 0 <= options.warmup < 1:
        raise UsageError(f"--warmup {options.warmup} is no share of the steps", hint="such as 0.1")
    if options.calibrate and options.arithmetic.method != "unit":
        raise UsageError(
            f"--calibrate with recipe `{options.arithmetic.name}`: {_NOTHING_TO_CALIBRATE[options.arithmetic.method]}",
            hint="leave --calibrate out, or choose --method unit",
        )
    if options.critical and not (options.arithmetic.is_scaled and options.arithmetic.precision == "fp8"):
        raise UsageError(
            f"--critical with recipe `{options.arithmetic.name}`: it has no scaled fp8 products to leave out",
            hint="leave --critical out, or choose a recipe such as unit-fp8",
        )
    if options.resume and options.force:
        raise UsageError("--resume and --force exclude each other", hint="resume continues a run, force starts anew")
    if options.eval_data is not None and options.data is None:
        raise UsageError("--eval-data without --data", hint="pass both, or neither for the embedded text")
    if options.data is not None and Path(options.data).is_dir():
        raise UsageError(f"`{options.data}` is a directory", hint="pass one file to --data")
