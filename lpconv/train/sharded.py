"""Sharded runs, in which each rank holds a part of the model by FSDP2, and their rank-independent checkpoints.

Trainer's own `fsdp=True` silently trains unsharded on a CPU, and accelerate widens 16-bit parameters to fp32. So the
model is sharded here, before Trainer sees it, and accelerate uses it as it is.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from lpconv.models.sharing import shard_parameters
from lpconv.scaled import from_disk, unscaled_state_dict
from lpconv.scaled.model import COMPUTE
from lpconv.train.job import TrainingJob, open_start
from lpconv.train.prepare import ScaledLowPrecisionAdamW
from lpconv.train.processes import mesh
from lpconv.train.recipes import RECIPES, Arithmetic

_MODEL, _OPTIMIZER = "model", "optimizer"


def shard(model: nn.Module, arithmetic: Arithmetic) -> None:
    """Shard every parameter by rows, in place; each rank keeps its rows, and a block's are gathered while it computes.

    The model is whole on all ranks, or was opened by rows (`lpconv.models.load`). Scaled parameters stored in fp32 are
    gathered and computed in the precision of the arithmetic; everything else is gathered as stored. Gradients are
    summed in fp32.
    """
    keeps_fp32 = arithmetic.is_scaled and arithmetic.variant is None
    carrier = COMPUTE[arithmetic.precision].carrier if keeps_fp32 else None
    policy = MixedPrecisionPolicy(param_dtype=carrier, reduce_dtype=torch.float32)
    shard_parameters(model, mesh(), policy)


def start_in_fp32(job: TrainingJob, seed: int) -> Any:
    """The starting model of a run, to compute in fp32; sharded over all ranks if the job is."""
    model = open_start(job, seed).model
    if job.options.is_sharded:
        shard(model, RECIPES["fp32"].arithmetic)
    return model


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write each rank's part of weights and optimizer state below `folder`; called by all ranks."""
    try:
        state_dict_saver.save(unscaled_state_dict(model), checkpoint_id=folder / _MODEL)
        state_dict_saver.save(_state_of(model, optimizer), checkpoint_id=folder / _OPTIMIZER)
    except CheckpointException as e:  # not an Exception; wraps the error of each rank
        raise next(iter(e.failures.values()))[0] from e


def load_model(folder: Path, model: nn.Module) -> None:
    """Load each rank's part of the weights written by `save`, on any number of ranks."""
    state = unscaled_state_dict(model)
    state_dict_loader.load(state, checkpoint_id=folder / _MODEL)
    from_disk(model, state)


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load each rank's part of the optimizer state written by `save`."""
    state = _state_of(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=folder / _OPTIMIZER)
    set_optimizer_state_dict(_holder(model, optimizer), optimizer, state)


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(_holder(model, optimizer), optimizer)


def _holder(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The module whose parameters the optimizer updates."""
    return optimizer.data if isinstance(optimizer, ScaledLowPrecisionAdamW) else model
