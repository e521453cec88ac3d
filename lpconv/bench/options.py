"""What a bench is asked for. Plain Python; nothing here starts a process."""

from dataclasses import dataclass

from lpconv.bench.interleave import Effort

__all__ = ["BenchOptions"]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure. `model` None lets the device choose; `device` None takes the GPU where there is one.

    No `batches` or `seqs` means what suits the model and device. Several `processes` work together as `parallel` says.
    """

    model: str | None = None
    formats: tuple[str, ...] = ("fp8",)
    methods: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("infer",)
    optimizers: tuple[str, ...] = ("adamw",)
    batches: tuple[int, ...] = ()
    seqs: tuple[int, ...] = ()
    layers: int | None = None
    compiled: str = "blocks"
    baseline: str = "bf16+compile"
    device: str | None = None
    threads: int | None = None
    processes: int = 1
    parallel: str | None = None
    seed: int = 0
    effort: Effort
    command: str | None = None
