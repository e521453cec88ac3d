"""`--compile`: a model compiled in place, and the steps that must not run compiled."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["compile_in_place", "uncompiled"]


def compile_in_place(model: Any) -> None:
    """Compile every call of `model` from now on. Its class, its names and its checkpoints stay as they are.

    Trainer's own `torch_compile` wraps the model and sets an environment variable that later runs would obey.
    """
    model.compile()


def uncompiled(model: Any) -> AbstractContextManager[Any]:
    """What a step runs in that hooks look into: compiled code does not call hooks that came after it was compiled."""
    is_compiled = model._compiled_call_impl is not None
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
