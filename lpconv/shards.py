"""The part of a sharded tensor on this rank. Does not import DTensor, which takes a second, unless it is in use."""

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
    """The part of a DTensor on this rank; any other tensor unchanged.

    This is the tensor that FSDP2 reads. `to_local()` returns a view of a parameter, and attributes set on a view are
    lost.
    """
    return x._local_tensor if is_sharded(x) else x


def placed_like(x: Tensor, part: Tensor) -> Tensor:
    """`part`, this rank's share of a tensor shaped like `x`, placed as `x` is: a DTensor if `x` is one."""
    if not is_sharded(x):
        return part
    return _placed(part, x.device_mesh, x.placements, x)


def placed_on(mesh: "DeviceMesh", rows: Tensor, x: Tensor) -> "DTensor":
    """A contiguous DTensor of the shape of `x` over `mesh`, from the rows that this rank holds."""
    from torch.distributed.tensor import Shard

    return _placed(rows, mesh, (Shard(0),), x)


def _placed(part: Tensor, mesh: "DeviceMesh", placements: "tuple[Placement, ...]", x: Tensor) -> "DTensor":
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def gather_whole(x: Tensor) -> Tensor:
    """The full tensor of a DTensor, which every rank must request; any other tensor unchanged."""
    return x.full_tensor() if is_sharded(x) else x
