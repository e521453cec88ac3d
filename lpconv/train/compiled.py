"""`--compile`: what cannot be compiled, and the steps that must not run compiled.

The model is compiled in place (`nn.Module.compile`), so that its class, its names and its checkpoints stay as they are;
Trainer's own `torch_compile` wraps it, and sets an environment variable that later runs of a process would obey.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lpconv.errors import UnsupportedError
from lpconv.train.recipes import Arithmetic

__all__ = ["check_compile", "uncompiled"]


def check_compile(arithmetic: Arithmetic) -> None:
    """Raises UnsupportedError for what torch.compile would pass over in silence, or cannot follow."""
    reason = _why_not(arithmetic)
    if reason is not None:
        raise UnsupportedError(
            f"--compile with recipe `{arithmetic.name}`: {reason}", hint="leave --compile out, or choose another recipe"
        )


def _why_not(arithmetic: Arithmetic) -> str | None:
    if arithmetic.loss_scale == "adaptive":
        return "its scales are chosen from values that compiled code does not see"
    if arithmetic.precision == "fp16" and not torch.cuda.is_available():
        return "a CPU's fp16 products run in a dispatch mode (`lpconv.kernels.half`), in which nothing is compiled"
    return None


def uncompiled(model: Any) -> AbstractContextManager[Any]:
    """What a step runs in that hooks look into: compiled code does not call hooks that came after it was compiled."""
    is_compiled = model._compiled_call_impl is not None
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
