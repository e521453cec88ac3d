"""Run functions on several gloo ranks, forked from one process that has imported what they need."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

__all__ = ["free_port", "on_ranks"]

_PRELOADED = ["lpconv.train.study", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"]


def on_ranks(
    world_size: int, function: Callable[..., Any], folder: Path, *arguments: object, has_group: bool = True
) -> Any:
    """Call `function(*arguments)` on each rank, in `folder`, and return the result of rank 0.

    Without `has_group`, ranks have the environment of torchrun but no process group yet: the function creates it.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    port = free_port()
    start_processes(  # type: ignore[no-untyped-call]  # untyped in torch
        _rank,
        args=(world_size, port, str(folder), function, arguments, has_group),
        nprocs=world_size,
        start_method="forkserver",
    )
    return torch.load(folder / "returned.pt", weights_only=False)


def free_port() -> int:
    """A TCP port that is free."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...],
    has_group: bool,
) -> None:  # fmt: skip
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LPCONV_COMPILE": "never"}
    os.chdir(folder)
    torch.set_num_threads(1)
    if has_group:
        dist.init_process_group("gloo")
    returned = function(*arguments)
    if rank == 0:
        torch.save(returned, "returned.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit ("terminate called without an active exception")
