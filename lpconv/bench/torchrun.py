"""A bench that torchrun started: its first process measures, with as many children as torchrun was asked for."""

import os
from collections.abc import Mapping

from lpconv.errors import UnsupportedError, UsageError

__all__ = ["processes_of"]


def processes_of(asked: int | None, environ: Mapping[str, str] = os.environ) -> int | None:
    """With how many processes this one measures; None for those of torchrun's that have nothing to do.

    The children are our own, in torchrun's number: baseline and variant need a set each, to take turns.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return asked or 1
    if asked not in (None, world):
        raise UsageError(f"--processes {asked} under torchrun with {world}", hint="leave --processes to torchrun")
    if int(environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise UnsupportedError("torchrun started this on several machines", hint="bench on one of them: --nnodes 1")
    return world if environ.get("RANK") == "0" else None
