"""Conversion between an optimizer's pairs and fp32: start from fp32 weights or a converted checkpoint, export fp32."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lpconv.errors import InputError
from lpconv.layouts.reader import StoredTensors
from lpconv.lookup import nearest
from lpconv.mcf.pairs import nearest_by_cast
from lpconv.mcf.split import BF16
from lpconv.optim.base import LowPrecisionOptimizer
from lpconv.optim.storage import Storage, store, stored_value
from lpconv.shards import gather_whole, local, placed_like


@torch.no_grad()
def start_from_fp32(optimizer: LowPrecisionOptimizer, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the parameters to fp32 `values`; the optimizer's low parts store the bits that bf16 rounding drops.

    `values` has one tensor per parameter name, either full or sharded like the parameter (a tied parameter under any of
    its names); other entries are ignored, so a whole state dict is accepted. Raises InputError, changing nothing, if a
    tensor is missing or has another shape.
    """
    pairs = [(p, _value_for(names, p, values)) for p, names in _require_named_parameters(optimizer, model)]
    for p, value in pairs:
        _set_fp32(optimizer, p, value)


@torch.no_grad()
def start_from_checkpoint(optimizer: LowPrecisionOptimizer, model: nn.Module, directory: str | Path) -> int:
    """Load a Collage conversion, with its residual in the optimizer's low parts; return the number of parameters set.

    The model is the result of `from_pretrained(directory)`, or the part of the trained model that corresponds to it (an
    encoder below a new head): the checkpoint's tensors are looked up under its parameter names. Parameters outside it,
    and those without a residual, are unchanged. Raises InputError if the directory has no residual, if its weights have
    changed since (the SHA-256 differs), if a shape differs, and if no name matches.
    """
    by_name = {name: p for p, names in _named_parameters(optimizer, model) for name in names}
    num_set = 0
    with StoredTensors.open(directory) as stored:
        if not stored.with_residual:
            raise InputError(
                f"`{directory}` has no Collage residual", hint="make one with `lpconv convert MODEL --method collage`"
            )
        for name in sorted(stored.with_residual & by_name.keys()):
            value = stored.tensor(name)
            _check_shape(name, by_name[name], value)
            _set_fp32(optimizer, by_name[name], value)
            num_set += 1
    if num_set == 0:
        raise InputError(
            f"no tensor in `{directory}` has the name of a trained parameter",
            hint=f"the model's first parameter is `{next(iter(by_name), None)}`",
        )
    return num_set


@torch.no_grad()
def fp32_state_dict(optimizer: LowPrecisionOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict with every trained parameter as an exact fp32 tensor; other tensors are unchanged.

    DTensors are gathered, so every rank must call this.
    """
    return {name: gather_whole(x) for name, x in fp32_values(optimizer, model).items()}


@torch.no_grad()
def fp32_values(optimizer: LowPrecisionOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return `fp32_state_dict` without gathering DTensors."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for p, names in _require_named_parameters(optimizer, model):
        value = stored_value(optimizer.storages(p)[0], tuple(local(x) for x in optimizer.parts(p)[0]))
        state |= dict.fromkeys(names, placed_like(p, value * optimizer.weight_scale(p)))
    return state


def _named_parameters(optimizer: LowPrecisionOptimizer, model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """The optimizer's parameters that are in the model, with their names there; tied ones have several."""
    names: dict[Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [(p, names[p]) for group in optimizer.param_groups for p in group["params"] if p in names]


def _require_named_parameters(optimizer: LowPrecisionOptimizer, model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return `_named_parameters`. Raises InputError if the model lacks one of the optimizer's parameters."""
    parameters = _named_parameters(optimizer, model)
    num_trained = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(parameters) < num_trained:
        raise InputError(
            f"{num_trained - len(parameters)} of the optimizer's {num_trained} parameters are not in this model",
            hint="pass the model whose parameters the optimizer was created with",
        )
    return parameters


def _value_for(names: list[str], p: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    name = next((n for n in names if n in values), None)
    if name is None:
        near = nearest(names[0], values)
        raise InputError(
            f"there is no value for parameter `{names[0]}`", hint=f"the nearest name is `{near}`" if near else None
        )
    _check_shape(name, p, values[name])
    return values[name]


def _check_shape(name: str, p: Tensor, value: Tensor) -> None:
    if value.shape != p.shape:
        raise InputError(
            f"`{name}` has shape {tuple(value.shape)}, but the parameter has {tuple(p.shape)}",
            hint="use the values of the model that was converted",
        )


def _set_fp32(optimizer: LowPrecisionOptimizer, p: Tensor, value: Tensor) -> None:
    storage, weight = optimizer.storages(p)[0], tuple(local(t) for t in optimizer.parts(p)[0])
    value = value.float() / optimizer.weight_scale(p)
    if isinstance(p, DTensor):
        value = local(distribute_tensor(value.to(p.device), p.device_mesh, p.placements))
    if storage in (Storage.PAIR, Storage.KAHAN):
        hi, lo = BF16.split(value)
        weight[0].copy_(hi)
        weight[1].copy_(lo)
    elif storage is Storage.STOCHASTIC:
        weight[0].copy_(value)
    else:
        store(storage, weight, value, nearest_by_cast)
