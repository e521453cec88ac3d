"""What can be measured: formats, methods, modes and optimizers, and a case of them. Imports no torch."""

from dataclasses import dataclass

from lpconv.errors import UsageError
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
    "fp4": dict.fromkeys(("nvfp4", "mx", "row")),
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


def check_seq(seq: int, most: int | None) -> None:
    """Raise UsageError if a sequence is longer than the model's `most` positions; None means no known limit."""
    if most is not None and seq > most:
        raise UsageError(f"--seq {seq} exceeds the model's maximum of {most} positions", hint=f"pass at most {most}")
