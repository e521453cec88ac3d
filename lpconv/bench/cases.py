"""What to measure: formats, methods, modes and sizes, multiplied out into cases. Imports no torch."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lpconv.errors import UsageError
from lpconv.lookup import find
from lpconv.options import PARALLEL
from lpconv.results.bench import BenchCase

MODES = ("infer", "train")
# What torch.compile is given: each block of the model (compiled once, since they share their code), the whole model,
# the whole model to be replayed as CUDA graphs, or nothing.
COMPILE_MODES = ("blocks", "model", "graphs", "off")
BASELINES = ("bf16+compile", "bf16", "fp16+compile", "fp16", "fp32+compile", "fp32")
PLAIN = "plain"
CODES = "codes"  # those of the checkpoint itself, which stay what they are and are decoded to bf16 as they are used


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library that we compare with: its module and the command that installs it."""

    module: str
    install: str


_TORCHAO = Peer(module="torchao", install="pip install torchao")
_TE = Peer(module="transformer_engine", install="pip install transformer-engine[pytorch]")

# Methods of `lpconv.scaled`: scaled tensors through the whole model.
SCALED = ("unit", "scalify")

# What a format can be run as, with the peer that it needs; the first is its default.
BENCH_FORMATS: dict[str, dict[str, Peer | None]] = {
    "fp32": {PLAIN: None},
    "bf16": {PLAIN: None},
    "fp16": dict.fromkeys((PLAIN, *SCALED)),
    "fp8": {
        **dict.fromkeys(("static", "tensor", "delayed", "row", "mx", *SCALED)),
        "torchao-tensorwise": _TORCHAO,
        "torchao-rowwise": _TORCHAO,
        "te": _TE,
    },
    "fp4": dict.fromkeys(("nvfp4", "ms-eden", "mx", "row")),
    CODES: {PLAIN: None},
}
BENCH_METHODS = {name: peer for methods in BENCH_FORMATS.values() for name, peer in methods.items()}
BENCH_OPTIMIZERS: dict[str, Peer | None] = {
    "adamw": None,
    "collage-light": None,
    "collage-plus": None,
    "optimi-kahan": Peer(module="optimi", install="pip install torch-optimi"),
    "torchao-stochastic": _TORCHAO,
    "torchao-8bit": _TORCHAO,
    "bitsandbytes-8bit": Peer(module="bitsandbytes", install="pip install bitsandbytes"),
}


@dataclass(frozen=True, kw_only=True)
class Case(BenchCase):
    """One configuration, complete: a child process needs nothing else."""

    threads: int | None = None
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in a step of one process."""
        return self.batch * self.seq

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The other libraries that it needs."""
        found = (BENCH_METHODS[self.method], BENCH_OPTIMIZERS[self.optimizer] if self.optimizer else None)
        return tuple(p for p in found if p is not None)


def expand(
    template: Case,
    *,
    formats: Sequence[str],
    methods: Sequence[str],
    modes: Sequence[str],
    optimizers: Sequence[str],
    sizes: Sequence[tuple[int, int]],
) -> Iterator[Case]:
    """Every case of a run, those that share a baseline together.

    A format that no asked method applies to runs as its default. Raises UsageError for unknown names, with the nearest.
    """
    for method in methods:
        find("method", method, BENCH_METHODS)
    for mode in modes:
        find("mode", mode, dict.fromkeys(MODES))
    for wanted in optimizers:
        find("optimizer", wanted, BENCH_OPTIMIZERS)
    runs = [(name, m) for name in dict.fromkeys(formats) for m in _methods_of(name, methods)]
    for mode, (batch, seq) in itertools.product(modes, sizes):
        chosen: Sequence[str | None] = optimizers if mode == "train" else [None]
        for (name, method), optimizer in itertools.product(runs, chosen):
            yield dataclasses.replace(
                template, format=name, method=method, mode=mode, optimizer=optimizer, batch=batch, seq=seq,
                compiled=_compiled(template, name, method),
            )  # fmt: skip


def _compiled(template: Case, format_name: str, method: str) -> str:
    """Scaled tensors cross the border of a compiled block in neither direction, and compiling a whole model of them
    takes a CPU minutes; codes are not compiled."""
    if format_name == CODES:
        return "off"
    if method not in SCALED or template.compiled == "off":
        return template.compiled
    return "off" if template.device == "cpu" else "model"


def _methods_of(name: str, asked: Sequence[str]) -> list[str]:
    possible = find("format", name, BENCH_FORMATS)
    default = next(iter(possible))
    chosen = [m for m in dict.fromkeys(asked) if m in possible]
    if default == PLAIN:
        return [PLAIN, *(m for m in chosen if m != PLAIN)]
    return chosen or [default]


def baseline_of(case: Case, name: str, *, compiled: str) -> Case:
    """The case that `case` is compared with: a 16- or 32-bit format `name`, with ``+compile`` where it is compiled.

    It is compiled as `compiled` says, and by block where that is "off".
    """
    find("baseline", name, dict.fromkeys(BASELINES))
    format_name, _, wants_compile = name.partition("+")
    how = "off" if not wants_compile else compiled if compiled != "off" else "blocks"
    optimizer = "adamw" if case.mode == "train" else None
    return dataclasses.replace(case, format=format_name, method=PLAIN, optimizer=optimizer, compiled=how)


def check_seq(seq: int, most: int | None) -> None:
    """Raise UsageError if a sequence is longer than the model's `most` positions; None means no known limit."""
    if most is not None and seq > most:
        raise UsageError(f"--seq {seq} exceeds the model's maximum of {most} positions", hint=f"pass at most {most}")


def parallel_of(processes: int, name: str | None, *, modes: Sequence[str], compiled: str) -> str | None:
    """How that many processes work together: as `name` says, else by DDP; None for one.

    Raises UsageError for what cannot be.
    """
    if name is not None:
        find("kind of parallelism", name, dict.fromkeys(PARALLEL))
    if processes == 1:
        if name is not None:
            raise UsageError(
                f"--parallel {name} needs more than one process", hint="add --processes 2, or start with torchrun"
            )
        return None
    if compiled == "graphs":
        raise UsageError("CUDA graphs cannot be measured with several processes", hint="pass --compile blocks")
    if name == "fsdp2" and "infer" in modes:
        raise UsageError(
            "--parallel fsdp2 shards trained weights, not codes for inference",
            hint="pass --mode train, or --parallel ddp to run independent copies",
        )
    return name or PARALLEL[0]
