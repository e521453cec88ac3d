"""With torch.distributed running, ranks agree on whether a step is skipped and on what logmax sees."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lpconv.loss_scale import largest_gradient, unscale_
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def two_ranks() -> list[Any]:
    """What each rank found."""
    rank = dist.get_rank()
    of_ranks: list[Any] = [None, None]
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

    dist.all_gather_object(of_ranks, (actual, largest, values, found_on_rank_1, found_without_gradients))  # type: ignore[no-untyped-call]
    return of_ranks


def test_two_ranks_agree(tmp_path: Path) -> None:
    for actual, largest, values, found_on_rank_1, found_without_gradients in on_ranks(2, two_ranks, tmp_path):
        assert (actual, found_on_rank_1, found_without_gradients) == (False, True, True)
        assert largest == 5.0
        assert values.tolist() == [0.125, 0.25, 0.375, -5.0]
