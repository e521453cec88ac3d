"""The model of a case, in fp32 with random or real weights, and a batch for it."""

import os
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lpconv.bench.cases import Case
from lpconv.checkpoint.resolve import resolve
from lpconv.errors import UsageError
from lpconv.models.inputs import max_length, random_ids, vocabulary_size
from lpconv.models.opening import Blueprint, blueprint
from lpconv.models.presets import PRESETS

__all__ = ["blocks_of", "find_model", "make_batch", "step_loss"]

_FIRST_ID = 5  # those before are special in many vocabularies
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")


def find_model(case: Case) -> Blueprint:
    """Find the model that the case names: ``demo``, a directory, a preset, an alias or a hub id, in this order."""
    is_preset = case.model in PRESETS and not os.path.isdir(case.model)
    found = blueprint(case.model if is_preset else resolve(case.model).directory)
    _shorten(found.config, case.layers)
    most = max_length(found.config)
    if most is not None and case.seq > most:
        raise UsageError(f"--seq {case.seq} is more than the model's {most} positions", hint=f"pass at most {most}")
    found.config.use_cache = False  # a forward pass over whole sequences; decoding token by token is not measured
    found.config._attn_implementation = "sdpa"
    return found


def _shorten(config: Any, layers: int | None) -> None:
    if layers is None:
        return
    key = next((k for k in _LAYER_KEYS if hasattr(config, k)), None)
    own = getattr(config, key) if key else 0
    if key is None or not 1 <= layers <= own:
        raise UsageError(f"--layers {layers}: the model has {own}", hint=f"pass 1 to {own}")
    setattr(config, key, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def make_batch(case: Case, config: Any, *, batch: int | None = None, seq: int | None = None) -> dict[str, Tensor]:
    """Random token ids of (batch, seq), the same for the same seed on every device."""
    shape = (batch or case.batch, seq or case.seq)
    ids = random_ids(shape, vocabulary_size(config), seed=case.seed, first=_FIRST_ID)
    return {"input_ids": ids.to(case.device)}


def step_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss with its inputs as labels; without a head, the mean square of what it returns."""
    if _has_head(model):
        loss: Tensor = model(**batch, labels=batch["input_ids"]).loss
        return loss
    return model(**batch)[0].float().square().mean()  # type: ignore[no-any-return]


def _has_head(model: Any) -> bool:
    own = model.module if isinstance(model, DistributedDataParallel) else model
    return own.get_output_embeddings() is not None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model: the longest list of modules in it; the model itself where there is none."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=len) if lists else [model]
