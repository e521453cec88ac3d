"""What the ranks of `test_peer_lost` do."""

import os

import torch
import torch.distributed as dist

from lpconv.cli.handling import handle_failures


def lose_a_peer() -> None:
    """Rank 1 goes as when memory is short; rank 0 is a command that adds up with it."""
    torch.distributed.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    handle_failures(_add_up)()


def _add_up() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
