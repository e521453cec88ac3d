"""The exact update of an optimizer step: the same step in fp32, from the stored weights and the gradient."""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lpconv.errors import UnsupportedError
from lpconv.optim.base import LowPrecisionOptimizer
from lpconv.optim.kernel import STEPS, apply_rule
from lpconv.optim.storage import load, stored_value
from lpconv.scaled.tensor import ScaledTensor


@torch.no_grad()
def weight_value(optimizer: Optimizer, p: Tensor) -> Tensor:
    """The value of a weight as a new fp32 tensor, including low parts, compensations and master copies."""
    if isinstance(p, DTensor):
        raise UnsupportedError("sharded parameters cannot be tracked", hint="measure with one process, without FSDP")
    if isinstance(optimizer, LowPrecisionOptimizer):
        return stored_value(optimizer.storages(p)[0], optimizer.parts(p)[0]).clone()
    master = optimizer.state[p].get("master") if p in optimizer.state else None
    if isinstance(p, ScaledTensor):
        return p.dequantize() if master is None else master * p.scale
    return (p if master is None else master).detach().float().clone()


@torch.no_grad()
def intended_updates(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The fp32 change, without rounding, that the next step would make to each parameter with a gradient.

    Changes nothing.

    Call it in place of `optimizer.step()`, with gradients unscaled and clipped. For lpconv's optimizers the rule is
    applied to the stored parts. Any other optimizer is copied, with parameters, gradients and state in fp32, and the
    copy takes the step; its state must be tensors of the parameter's shape or smaller, as in torch's optimizers.
    """
    if isinstance(optimizer, LowPrecisionOptimizer):
        return {
            p: _update_by_rule(optimizer, group, p)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        }
    return _updates_by_copy(optimizer)


def _update_by_rule(optimizer: LowPrecisionOptimizer, group: dict[str, Any], p: Tensor) -> Tensor:
    assert p.grad is not None
    rule, storages, parts = optimizer.settings.rule, optimizer.storages(p), optimizer.parts(p)
    step = int(optimizer.state[p]["step"]) + 1
    coefficients = STEPS[rule.name].coefficients(group, step)
    scalars = torch.tensor(coefficients, dtype=torch.float32, device=p.device).unbind()
    return apply_rule(rule, storages, parts, p.grad, scalars)[0] - load(storages[0], parts[0])


def _updates_by_copy(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    twins = {p: _twin(optimizer, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    starts = {p: twin.detach().clone() for p, twin in twins.items()}
    shadow = object.__new__(type(optimizer))
    # Not `step`, which a learning-rate scheduler wraps on the instance, and no hooks: this step must have no side
    # effects.
    shadow.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.param_groups = [
        {**group, "params": [twins[p] for p in group["params"] if p in twins]} for group in optimizer.param_groups
    ]
    shadow.state = defaultdict(
        dict, {twins[p]: _widen_state(optimizer.state[p]) for p in twins if p in optimizer.state}
    )
    shadow.step()
    return {p: twin.detach() - starts[p] for p, twin in twins.items()}


def _twin(optimizer: Optimizer, p: Tensor) -> Tensor:
    """The weight as a plain fp32 parameter with a plain fp32 gradient."""
    twin = torch.nn.Parameter(weight_value(optimizer, p))
    assert p.grad is not None
    twin.grad = p.grad.dequantize() if isinstance(p.grad, ScaledTensor) else p.grad.detach().float().clone()
    return twin


def _widen_state(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer state with 16-bit tensors in fp32, and without the master copy."""
    narrow = (torch.bfloat16, torch.float16)
    return {
        name: value.float() if isinstance(value, Tensor) and value.dtype in narrow else copy.deepcopy(value)
        for name, value in state.items()
        if name != "master"
    }
