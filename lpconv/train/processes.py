"""The processes that train together: one, or those that torchrun starts."""

import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def is_main_process() -> bool:
    """Whether this process writes; of several, only the first does."""
    return bool(_state().is_main_process)


def num_processes() -> int:
    """How many there are."""
    return int(_state().num_processes)


def wait_for_all() -> None:
    """Until all processes are here."""
    _state().wait_for_everyone()


def mesh() -> DeviceMesh:
    """All of them in a row."""
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (num_processes(),))


def backend() -> str | None:
    """What they talk through: gloo on CPUs, torch's choice on GPUs, None for one process."""
    return "gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.cuda.is_available() else None


def _state() -> Any:
    """accelerate's shared state, made on first use, which is what joins the processes."""
    from accelerate import PartialState  # seconds to import, and needed by no --help

    options = {"backend": backend()} if backend() else {}
    return PartialState(cpu=not torch.cuda.is_available(), **options)
