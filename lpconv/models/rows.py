"""A model whose ranks each open their own rows; the rest stays in the files.

transformers receives tensors that it can rename, stack and join without reading a number. Any other operation reads a
whole tensor, whose name is reported.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lpconv.forms.reader import StoredTensors
from lpconv.models.coded import CodedTensor
from lpconv.models.load import load_from_files
from lpconv.shards import placed_on
from lpconv.storage.checkpoint import Checkpoint, Openable


def load_rows(
    path: Openable, mesh: DeviceMesh, *, model_class: Any, **kwargs: Any
) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """The model in fp32 with this rank's rows as DTensors, sharded like FSDP2; values are those of `load_with_missing`.

    Also returns the names of parameters that the checkpoint lacks, and of matrices that this rank temporarily held
    whole. Buffers and missing parameters are whole too.
    """
    checkpoint = Checkpoint.open(path)
    with StoredTensors.open(checkpoint) as stored:
        model, missing = load_from_files(checkpoint, stored, model_class=model_class, **kwargs)
        read_whole = {n for n, p in model.named_parameters() if p.ndim > 1 and not isinstance(p, CodedTensor)}
        _keep_rows(model, mesh)
    return model, missing, tuple(sorted(read_whole.difference(missing)))


def _keep_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every parameter by this rank's rows, in place; buffers stay whole and tied parameters stay tied."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and p not in replacements:
                replacements[p] = nn.Parameter(_shard(p.detach(), mesh), requires_grad=p.requires_grad)
            if p is not None:
                module._parameters[key] = replacements[p]
        coded = {key: x.decode() for key, x in module._buffers.items() if isinstance(x, CodedTensor)}
        module._buffers.update(coded)


def _shard(x: Tensor, mesh: DeviceMesh) -> Tensor:
    size = -(-len(x) // mesh.size())
    start, stop = (min(i * size, len(x)) for i in (mesh.get_local_rank(), mesh.get_local_rank() + 1))
    return placed_on(mesh, _rows(x, start, stop).to(mesh.device_type), x)


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """Copy rows of `x` to new memory."""
    if start == stop:
        return torch.empty((0, *x.shape[1:]), dtype=x.dtype)
    if not isinstance(x, CodedTensor):
        return x[start:stop].clone()
    row = x.numel() // len(x)
    return x.part(start * row, stop * row, (stop - start, *x.shape[1:])).decode()
