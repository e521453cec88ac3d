"""Options of `lpconv bench`, and what they choose from: formats, methods, modes and optimizers.

Plain Python; nothing here imports torch or starts a process.
"""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from importlib.util import find_spec

from annotated_types import Ge

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.spec import spellings
from lpconv.options import PARALLEL, AllowMissing, Group, ResumedByBatch, Revision, gate_option, option
from lpconv.results.bench import BenchCase

MODES = ("infer", "train")
# What torch.compile is given: each block of the model (compiled once, since they share their code), the whole model,
# the whole model to be replayed as CUDA graphs, or nothing.
COMPILE_MODES = ("blocks", "model", "graphs", "off")
BASELINES = ("bf16+compile", "bf16", "fp16+compile", "fp16", "fp32+compile", "fp32")
PLAIN = "plain"
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")  # in configs of transformers
CODES = "codes"  # those of the checkpoint itself, which stay what they are and are decoded to bf16 as they are used


# Methods of `lpconv.scaled`: scaled tensors through the whole model.
SCALED = ("unit", "scalify")

# What a format can be run as, with the module of the library that it needs (a peer); the first is its default.
BENCH_FORMATS: dict[str, dict[str, str | None]] = {
    "fp32": {PLAIN: None},
    "bf16": {PLAIN: None},
    "fp16": dict.fromkeys((PLAIN, *SCALED)),
    "fp8": {
        **dict.fromkeys(("static", "tensor", "delayed", "row", "mx", *SCALED)),
        "torchao-tensorwise": "torchao",
        "torchao-rowwise": "torchao",
        "te": "transformer_engine",
    },
    "fp4": dict.fromkeys(("nvfp4", "ms-eden", "mx", "row")),
    CODES: {PLAIN: None},
}
BENCH_METHODS = {name: peer for methods in BENCH_FORMATS.values() for name, peer in methods.items()}
# Packages of peers whose module has another name.
_PACKAGES = {"transformer_engine": "transformer-engine[pytorch]", "optimi": "torch-optimi"}
BENCH_OPTIMIZERS: dict[str, str | None] = {
    "adamw": None,
    "collage-light": None,
    "collage-plus": None,
    "optimi-kahan": "optimi",
    "torchao-stochastic": "torchao",
    "torchao-8bit": "torchao",
    "bitsandbytes-8bit": "bitsandbytes",
}


@dataclass(frozen=True, kw_only=True)
class Case(BenchCase):
    """One configuration, complete: a child process needs nothing else."""

    threads: int | None = None
    seed: int = 0
    revision: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens in a step of one process."""
        return self.batch * self.seq

    def lacks_peer(self) -> UnsupportedError | None:
        """The error for a library that it needs and that is not installed; None if there is none."""
        peers = (BENCH_METHODS[self.method], BENCH_OPTIMIZERS[self.optimizer] if self.optimizer else None)
        for peer in peers:
            if peer is not None and find_spec(peer) is None:
                return UnsupportedError(f"`{peer}` is not installed", hint=f"pip install {_PACKAGES.get(peer, peer)}")
        return None


def check_layers(layers: int | None, own: int | None) -> None:
    """Raise UsageError unless the model has so many layers; `own` is None if their number is not known."""
    if layers is not None and own is not None and not 1 <= layers <= own:
        raise UsageError(f"--layers {layers}: the model has only {own}", hint=f"pass a number from 1 to {own}")


# Options by panel of the help; those with `panel=None` come first, in a panel that most people need.
_what = functools.partial(option, panel="What to measure")
_how = functools.partial(option, panel="How to measure")
_check = functools.partial(option, panel="Results")


def parse_device(text: str) -> str:
    """The name of a device. Raises UsageError if it is not valid."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise UsageError(f"unknown device `{text}`", hint="pass cpu, cuda or cuda:N")
    return text


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure each case: minimum iterations and seconds, and the number of interleaved rounds.

    They are divided among `launches`, each with new processes.
    """

    min_iterations: int = _how(30, "Minimum number of timed steps per case", Ge(1), name="min_iters")
    min_seconds: float = _how(2.0, "Minimum measuring time per case, in seconds", Ge(0), name="min_time")
    rounds: int = _how(12, "Number of rounds, in each of which baseline and variant take turns", Ge(1))
    launches: int = _how(3, "Number of new processes over which the rounds are spread", Ge(1))
    warm_up_iterations: int = 3
    warm_up_seconds: float = 0.3

    def of_a_launch(self) -> "Effort":
        """The share of one launch in iterations, seconds and rounds."""
        return dataclasses.replace(
            self,
            min_iterations=math.ceil(self.min_iterations / self.launches),
            min_seconds=self.min_seconds / self.launches,
            rounds=math.ceil(self.rounds / self.launches),
            launches=1,
        )


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure, and what to compare the result with. `model` None selects one for the device."""

    model: str | None = None
    formats: tuple[str, ...] = _what(
        ("fp8",),
        "Formats to measure",
        name="format",
        short=("-f",),
        choices=BENCH_FORMATS,
        spellings=spellings({"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "e4m3fn": "fp8", "e2m1": "fp4"}),
        comma=True,
        panel=None,
    )
    methods: tuple[str, ...] = _what(
        (),
        "Methods for fp8, fp4 and fp16",
        default=f"for fp8 {next(iter(BENCH_FORMATS['fp8']))}",
        name="method",
        short=("-m",),
        choices=BENCH_METHODS,
        comma=True,
        panel=None,
    )
    modes: tuple[str, ...] = _what(
        ("infer",), "Kinds of steps to measure", name="mode", choices=MODES, comma=True, panel=None
    )
    optimizers: tuple[str, ...] = _what(
        ("adamw",), "Optimizers for training steps", name="optimizer", choices=BENCH_OPTIMIZERS, comma=True
    )
    layers: int | None = _what(None, "Number of model layers to keep", Ge(1), default="all")
    batches: tuple[int, ...] = _what(
        (),
        "Number of sequences per step and process",
        Ge(1),
        default="chosen by device",
        name="batch",
        flag="batch-size",
        comma=True,
    )
    seqs: tuple[int, ...] = _what(
        (), "Number of tokens per sequence", Ge(1), default="chosen by device", name="seq", flag="seq-len", comma=True
    )
    baseline: str = _how("bf16+compile", "Baseline that all variants are compared with", choices=BASELINES, panel=None)
    compiled: str = _how(
        "blocks", "What to compile with torch.compile", name="compile", what="compile mode", choices=COMPILE_MODES
    )
    device: str | None = _how(None, "Device: cpu, cuda or cuda:N", default="a GPU if there is one", parse=parse_device)
    processes: int | None = _how(None, "Number of cooperating processes", Ge(1), default="torchrun's, or 1")
    parallel: str | None = _how(
        None, "How processes share a model", default="ddp", what="kind of parallelism", choices=PARALLEL
    )
    threads: int | None = _how(None, "Number of CPU threads of each process", Ge(1), default="torch's own")
    effort: Effort = option(Effort(), Group(Effort))
    seed: int = _how(0, "Seed of weights and token ids", Ge(0))
    compare: str | None = _check(None, "Older result (JSON); fail if a row became slower", metavar="FILE", is_path=True)
    gates: tuple[str, ...] = option(
        (), gate_option("Fail with exit code 5 unless every row meets this, such as 'speedup>=1.2'", kind="bench")
    )
    command: str | None = option(None, "Command line to record in the result", only="caller", of_run=True)
    revision: Revision = None
    allow_missing: AllowMissing = False
    resume: ResumedByBatch = False
    force: bool = option(False, "Replace an existing result", only="manifest", of_run=True)

    @property
    def num_processes(self) -> int:
        """Number of cooperating processes."""
        return self.processes or 1
