"""What of a tensor is on this rank. A DTensor is met only where somebody imported them, which takes a second."""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_sharded(x: object) -> "TypeGuard[DTensor]":
    """Whether `x` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """The part of a DTensor on this rank, and any other tensor itself.

    It is the very tensor that FSDP2 reads: `to_local()` gives a view of a parameter's, and what is set on that is lost.
    """
    return x._local_tensor if is_sharded(x) else x


def placed_like(x: Tensor, part: Tensor) -> Tensor:
    """`part`, which this rank has of a tensor of the shape of `x`, placed as `x` is: a DTensor where that is one."""
    if not is_sharded(x):
        return part
    return _placed(part, x.device_mesh, x.placements, x)


def placed_on(mesh: "DeviceMesh", rows: Tensor, x: Tensor) -> "DTensor":
    """The DTensor of the shape of `x`, contiguous, of which this rank of the mesh has these rows."""
    from torch.distributed.tensor import Shard

    return _placed(rows, mesh, (Shard(0),), x)


def _placed(part: Tensor, mesh: "DeviceMesh", placements: "tuple[Placement, ...]", x: Tensor) -> "DTensor":
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def gather_whole(x: Tensor) -> Tensor:
    """A DTensor gathered, which every rank must ask for, and any other tensor itself."""
    return x.full_tensor() if is_sharded(x) else x
