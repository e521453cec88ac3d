"""Checks that reject a run before its work begins, beyond those of its options alone."""

import torch
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from lpconv.errors import UnsupportedError, UsageError
from lpconv.lookup import find
from lpconv.train.options import FinetuneOptions
from lpconv.train.processes import num_processes
from lpconv.train.recipes import Arithmetic


def check_run(options: FinetuneOptions) -> None:
    """Raise UsageError for options that conflict in this environment, UnsupportedError for impossible ones."""
    arithmetic = options.arithmetic
    if options.lca and arithmetic.is_scaled and arithmetic.variant is not None:
        raise UnsupportedError(
            f"--lca with recipe `{arithmetic.name}`: optimizer `{arithmetic.optimizer}` steps on the data of scaled "
            "weights, not on the model's parameters",
            hint="leave --lca out, or choose --optimizer adamw",
        )
    reason = _why_not_compiled(arithmetic)
    if options.compile and reason is not None:
        raise UnsupportedError(
            f"--compile with recipe `{arithmetic.name}`: {reason}", hint="leave --compile out, or choose another recipe"
        )
    if arithmetic.flag and num_processes() > 1:
        raise UnsupportedError(f"{arithmetic.flag} runs in one process", hint="start it without torchrun")
    if options.is_sharded:
        _check_sharded(options)
    if num_processes() > 1:
        _check_shared(options)
    for name in options.log_to:
        find("place to log to", name, INTEGRATION_TO_CALLBACK)
        if name not in get_available_reporting_integrations():
            raise UnsupportedError(f"--log-to {name}: its package is not installed", hint=f"pip install {name}")


def _why_not_compiled(arithmetic: Arithmetic) -> str | None:
    """Why torch.compile would silently ignore a part of the recipe or cannot compile it, or None."""
    if arithmetic.loss_scale == "adaptive":
        return "its scales depend on values that compiled code cannot read"
    if arithmetic.precision == "fp16" and not torch.cuda.is_available():
        return "fp16 products on a CPU run in a dispatch mode (`lpconv.kernels.matmul`), which cannot be compiled"
    return None


def _check_shared(options: FinetuneOptions) -> None:
    """Raise UnsupportedError for options that several processes cannot carry out together."""
    if options.lca:
        raise UnsupportedError(
            f"--lca does not support {num_processes()} processes: each would repeat the same measurement",
            hint="run it with one process",
        )
    if options.batch_size % num_processes():
        raise UsageError(
            f"--batch-size {options.batch_size} cannot be divided among {num_processes()} processes",
            hint="it is the number of sequences per step over all processes",
        )


def _check_sharded(options: FinetuneOptions) -> None:
    """Raise UnsupportedError for options that do not work with a model in parts."""
    if num_processes() == 1:
        raise UsageError(
            "--parallel fsdp2 needs more than one process",
            hint="start with torchrun: `torchrun --nproc-per-node 2 -m lpconv …`",
        )
    if options.compile:
        raise UnsupportedError("--compile with --parallel fsdp2 has not been tested", hint="leave one of them out")
    if options.track_every:
        raise UnsupportedError(
            "--track-every with --parallel fsdp2 is not possible: no process has whole tensors",
            hint="leave --track-every out, or use --parallel ddp",
        )
