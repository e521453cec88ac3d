"""The processes that train together: one, or those started by torchrun."""

import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def is_main_process() -> bool:
    """Whether this process writes files; only the first one does."""
    return bool(_state().is_main_process)


def num_processes() -> int:
    """Number of processes."""
    return int(_state().num_processes)


def wait_for_all() -> None:
    """Wait until all processes have arrived here."""
    _state().wait_for_everyone()


def mesh() -> DeviceMesh:
    """One-dimensional device mesh over all processes."""
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (num_processes(),))


def backend() -> str | None:
    """Communication backend: gloo on CPUs, torch's choice on GPUs, None for one process."""
    return "gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.cuda.is_available() else None


def _state() -> Any:
    """accelerate's shared state. It is created on first use, which joins the process group."""
    from accelerate import PartialState  # takes seconds to import, and --help does not need it

    options = {"backend": backend()} if backend() else {}
    return PartialState(cpu=not torch.cuda.is_available(), **options)
