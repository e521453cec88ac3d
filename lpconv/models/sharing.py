"""Sharding a model's parameters over ranks with FSDP2. Import this module lazily: the import takes a second."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lpconv.layers import blocks_of
from lpconv.shards import is_sharded


def shard_parameters(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard every parameter over the ranks of the mesh with FSDP2, in place; blocks are gathered while they compute.

    The model is either whole on all ranks, or was opened by rows.
    """
    with _whole_on_meta(model):
        for block in blocks_of(model):
            if block is not model:
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)


def running_copy(model: nn.Module, mesh: DeviceMesh) -> Any:
    """A copy of a model opened by rows, on the same tensors, that computes in fp32 and frees all it gathers."""
    copied: Any = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    shard_parameters(copied, mesh, MixedPrecisionPolicy(reduce_dtype=torch.float32))
    copied.set_reshard_after_forward(True)
    return copied


@contextmanager
def _whole_on_meta(model: nn.Module) -> Iterator[None]:
    """Replace rows by whole parameters on the meta device inside the context, for FSDP to shard, then restore the rows.

    FSDP pads them at the first forward pass, as it does for all exchanged parameters.
    """
    rows: list[tuple[nn.Module, str, Any]] = [
        (module, key, p) for module in model.modules() for key, p in module._parameters.items() if is_sharded(p)
    ]
    outlines: dict[int, nn.Parameter] = {}
    for module, key, p in rows:
        if id(p) not in outlines:
            empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
            outlines[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
        module._parameters[key] = outlines[id(p)]
    yield
    for module, key, p in rows:
        module._parameters[key] = p
