"""A scaled model on disk: parameters in the layout of a converted checkpoint, and calibrated factors.

A parameter is stored as codes with a leading component axis, and a scale in fp32. Calibrated factors are powers of two,
one pair per edge, in `calibration.json` next to the weights, which conversions copy.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lpconv.errors import InputError
from lpconv.forms.scaled import pack_scaled, unpack_scaled
from lpconv.scaled.calibrate import EdgeFactors
from lpconv.scaled.scales import ratio, times
from lpconv.scaled.tensor import ScaledTensor
from lpconv.shards import gather_whole, is_sharded, local, placed_like
from lpconv.storage.contents import read_json
from lpconv.storage.partfile import write_small

CALIBRATION_FILE = "calibration.json"


def to_disk(model: nn.Module) -> dict[str, Tensor]:
    """Return a scaled model's state as plain tensors: ``name`` [1, …] with ``name_scale`` [1], others unchanged.

    A tied parameter appears under its first name only, as `safetensors` requires. Sharded ones are gathered, so every
    rank must call this.
    """
    tensors: dict[str, Tensor] = {}
    for name, x in _distinct(model):
        own = local(x.detach())
        if isinstance(own, ScaledTensor):
            tensors |= pack_scaled(name, gather_whole(placed_like(x, own.data_part)), own.scale)
        else:
            tensors[name] = gather_whole(x.detach())
    return tensors


def from_disk(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors of `to_disk` or of a converted checkpoint; each parameter keeps its own scale.

    Under FSDP2 every rank takes its own rows, from whole tensors or from `unscaled_state_dict`. Moving values between
    scales is exact if both scales are powers of two and the data's dtype can represent the result. Raises `InputError`
    for a missing parameter or a shape that does not fit.
    """
    for name, x in _distinct(model):
        if name not in tensors:
            raise InputError(
                f"the checkpoint has no tensor `{name}`", hint="pass a checkpoint of the same architecture"
            )
        stored, stored_scale = unpack_scaled(name, tensors)
        if stored.shape != x.shape:
            raise InputError(
                f"tensor `{name}` has shape {tuple(stored.shape)}, not {tuple(x.shape)}",
                hint="pass a checkpoint of the same architecture",
            )
        with torch.no_grad():
            own, rows = local(x), _own_rows(stored, x)
            if isinstance(own, ScaledTensor):
                own.data_part.copy_(times(rows.to(torch.float32), ratio(stored_scale, own.scale)))
            else:
                own.copy_(times(rows.to(x.dtype), stored_scale))


def _distinct(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The parameters and buffers of a model, tied ones once, under their first name."""
    entries: dict[int, tuple[str, Tensor]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        entries.setdefault(id(x), (name, x))
    return entries.values()


def _own_rows(stored: Tensor, x: Tensor) -> Tensor:
    """This rank's part of `stored`, sharded like `x`."""
    if not is_sharded(x) or is_sharded(stored):
        return local(stored)
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(stored.to(x.device), x.device_mesh, x.placements, src_data_rank=None))


def write_factors(directory: Path, factors: Mapping[str, EdgeFactors]) -> None:
    """Write edge factors next to a checkpoint, as exponents of two; that of an input only if it has a factor."""
    exponents = {}
    for name, edge in factors.items():
        powers = (edge.forward, edge.backward, *([edge.input] if edge.input != 1 else []))
        exponents[name] = [math.frexp(power)[1] - 1 for power in powers]
    document = {"schema_version": 1, "kind": "calibration", "exponents": exponents}
    write_small(directory / CALIBRATION_FILE, json.dumps(document, indent=1) + "\n")


def read_factors(directory: Path) -> dict[str, EdgeFactors]:
    """Read edge factors from `write_factors`. Raises `InputError` if the file is missing or damaged."""
    path = directory / CALIBRATION_FILE
    document = read_json(path)
    exponents = document.get("exponents")
    if document.get("kind") != "calibration" or not isinstance(exponents, dict):
        raise InputError(
            f"`{path}` is not a calibration file", hint="write it again with `lpconv probe MODEL --calibrate`"
        )
    factors = {}
    for name, pair in exponents.items():
        if not (isinstance(pair, list) and len(pair) in (2, 3) and all(type(e) is int and abs(e) <= 126 for e in pair)):
            raise InputError(
                f"`{path}`: the exponents of `{name}` are {pair}",
                hint="they must be two or three whole numbers from -126 to 126; write the file again",
            )
        powers = [math.ldexp(1.0, e) for e in pair]
        factors[name] = EdgeFactors(**dict(zip(("forward", "backward", "input"), powers, strict=False)))
    return factors
