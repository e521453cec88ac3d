"""Parameters in the layout of a converted checkpoint: codes with a leading component axis, and a scale in fp32."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lpconv.errors import InputError
from lpconv.scaled.scales import ratio, times
from lpconv.scaled.tensor import ScaledTensor

__all__ = ["from_disk", "to_disk"]


def to_disk(model: nn.Module) -> dict[str, Tensor]:
    """The state of a scaled model as plain tensors: ``name`` [1, …] with ``name_scale`` [1], others as they are.

    A tied parameter appears under its first name only, as `safetensors` asks for.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in model.state_dict(keep_vars=True).items():
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, ScaledTensor):
            tensors[name] = x.data_part.detach().unsqueeze(0).contiguous()
            tensors[f"{name}_scale"] = torch.as_tensor(x.scale, dtype=torch.float32).reshape(1).clone()
        else:
            tensors[name] = x.detach()
    return tensors


def from_disk(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill the parameters of a scaled model from `to_disk` or a converted checkpoint; each keeps its own scale.

    Values move between scales exactly where both are powers of two and the dtype of the data holds them. Raises
    `InputError` for a missing parameter or a shape that does not fit.
    """
    seen: set[int] = set()
    for name, x in model.state_dict(keep_vars=True).items():
        if id(x) in seen:
            continue
        seen.add(id(x))
        if name not in tensors:
            raise InputError(f"the checkpoint has no tensor `{name}`", hint="is it of the same architecture?")
        codes, scale = tensors[name], tensors.get(f"{name}_scale")
        stored = codes if scale is None else codes[0]
        if stored.shape != x.shape:
            raise InputError(
                f"tensor `{name}` has shape {tuple(stored.shape)}, not {tuple(x.shape)}",
                hint="is it of the same architecture?",
            )
        stored_scale = 1.0 if scale is None else float(scale.reshape(-1)[0])
        with torch.no_grad():
            if isinstance(x, ScaledTensor):
                x.data_part.copy_(times(stored.to(torch.float32), ratio(stored_scale, x.scale)))
            else:
                x.copy_(times(stored.to(x.dtype), stored_scale))
