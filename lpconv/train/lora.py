"""LoRA: a low-rank adapter next to every linear layer, whose weight stays as stored (Hu et al. 2021, arXiv 2106.09685).

    y = x Wᵀ + (α/r) (x Aᵀ) Bᵀ    A [r, inputs] drawn, B [outputs, r] zero at the start, α = 2r

Only A and B have gradients. W may be codes in memory (`models/coded.py`), as in QLoRA (Dettmers et al. 2023, arXiv
2305.14314). Names, shapes, start and order of operations are those of PEFT, which opens the files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lpconv.layers import LinearLayer, head, linears
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.contents import ADAPTER
from lpconv.storage.partfile import write_small
from lpconv.train.adapter import PREFIX, WEIGHTS, A, B
from lpconv.train.memory import storage_bytes

_ALPHA = 2  # lora_alpha per rank, a common choice of PEFT's users
_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # PEFT refuses adapters of their out_proj


def add_adapters(model: Any, rank: int, seed: int) -> None:
    """Give every linear layer but the head an adapter, drawn from `seed`, and freeze everything else.

    The state of the model is then that of its adapters.
    """
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for x in linears(model):
        if _takes_adapter(model, x):
            options: dict[str, Any] = {"bias": False, "device": x.module.weight.device}
            x.module.lora_A = nn.Linear(x.in_features, rank, **options)  # torch draws as PEFT does: kaiming-uniform
            x.module.lora_B = nn.Linear(rank, x.out_features, **options)
            nn.init.zeros_(x.module.lora_B.weight)
            x.module.register_forward_hook(_add_product)
    model._register_state_dict_hook(_keep_adapters)
    model.register_load_state_dict_post_hook(_allow_others)


def _takes_adapter(model: Any, layer: LinearLayer) -> bool:
    is_read_by_kernel = layer.name.endswith(".out_proj") and model.config.model_type in _MAMBA
    return layer.is_replaceable and layer.module is not head(model) and not is_read_by_kernel


def _add_product(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    product: Tensor = module.lora_B(module.lora_A(args[0]))
    return output + product * _ALPHA


def _keep_adapters(module: Any, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
    for name in [n for n in state if not n.endswith((A, B))]:
        del state[name]


def _allow_others(module: Any, keys: Any) -> None:
    """Let a state without the frozen weights be loaded."""
    keys.missing_keys[:] = [n for n in keys.missing_keys if n.endswith((A, B))]


def layers_without_adapter(model: nn.Module) -> tuple[str, ...]:
    """Weights of linear layers, other than the head's, that stay frozen without an adapter."""
    others = (x for x in linears(model) if not _takes_adapter(model, x) and x.module is not head(model))
    return tuple(f"{x.name}.{x.parameter}" for x in others)


def bytes_by_part(model: nn.Module) -> dict[str, int]:
    """Bytes of the frozen weights as they are in memory, and of adapters with gradients and AdamW's state."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {"weights": storage_bytes(frozen), "adapters, gradients and optimizer": 4 * trained}


def save_adapter(folder: Path, base: Checkpoint, task: str, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    tensors = {PREFIX + name: x.contiguous() for name, x in values.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    adapted = [x for x in linears(model) if hasattr(x.module, "lora_A")]
    rank = len(next(x for name, x in values.items() if name.endswith(A)))
    own_class = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    config: dict[str, Any] = {  # PEFT's defaults are left out
        "auto_mapping": None if task == "clm" else own_class,  # PEFT has no masked task
        "base_model_name_or_path": base.origin.hub_id or base.origin.name,
        "bias": "none",
        "fan_in_fan_out": all(x.kind == "Conv1D" for x in adapted),
        "inference_mode": True,
        "lora_alpha": _ALPHA * rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "revision": base.origin.revision,
        "target_modules": sorted(x.name for x in adapted),
        "task_type": "CAUSAL_LM" if task == "clm" else None,
    }
    write_small(folder / ADAPTER, json.dumps(config, indent=2) + "\n")
