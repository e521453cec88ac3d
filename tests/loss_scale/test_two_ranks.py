"""With torch.distributed running, ranks agree on whether a step is skipped and on what logmax sees."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from lpconv.loss_scale import largest_gradient, unscale_

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    own = nn.Parameter(torch.zeros(1))

    sharded.grad = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, -40.0]), mesh, [Shard(0)])  # -40 lies on rank 1
    own.grad = torch.ones(1)
    actual, largest = unscale_([sharded, own], 8.0), largest_gradient([sharded, own])
    values = sharded.grad.full_tensor()
    own.grad = torch.tensor([torch.inf if rank == 1 else 1.0])
    found_on_rank_1 = unscale_([own], 8.0)
    found_without_gradients = unscale_([nn.Parameter(torch.zeros(1))] if rank == 0 else [own], 8.0)

    torch.save((actual, largest, values, found_on_rank_1, found_without_gradients), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_agree(tmp_path: Path) -> None:
    spawn(two_ranks, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        actual, largest, values, found_on_rank_1, found_without_gradients = torch.load(tmp_path / f"{rank}.pt")
        assert (actual, found_on_rank_1, found_without_gradients) == (False, True, True)
        assert largest == 5.0
        assert values.tolist() == [0.125, 0.25, 0.375, -5.0]
