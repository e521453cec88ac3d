"""Guards of scaled training: a gradient check against the plain model before it begins, and overflow handling."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpconv.errors import UnsupportedError, UsageError
from lpconv.scaled.model import scaling_of
from lpconv.scaled.pair import Role
from lpconv.scaled.tensor import ScaledTensor, scaled_tensor
from lpconv.shards import is_sharded, local

_TOLERANCE = 1e-3  # rounding of fp32 in deep models is below 1e-5; a wrong rule is above 1e-2


class StepGuard:
    """Calls an optimizer's step only if all gradients are finite, and adapts the loss scale to overflows.

    After a skipped step the loss scale at the start of the backward pass is halved, and so are the targets of gradient
    rescaling: otherwise Scalify's next place would undo the first change. After `patience` finite steps in a row both
    are doubled, up to their initial values. The factor stays within [2^-24, 1]. `num_skipped` counts skipped steps.
    """

    def __init__(self, model: nn.Module, *, patience: int = 2000) -> None:
        if scaling_of(model) is None:
            raise UsageError("the model is not scaled", hint="call lpconv.scaled.scaled(model) first")
        self.model, self.patience = model, patience
        self.num_skipped = 0
        self._halvings = 0
        self._num_finite = 0

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the step if gradients are finite, and return whether it was taken. Reads one boolean from the device."""
        is_finite = gradients_are_finite(p for group in optimizer.param_groups for p in group["params"])
        if is_finite:
            optimizer.step()
        self.update(not is_finite)
        return is_finite

    def update(self, found_nonfinite: bool) -> None:
        """The bookkeeping of `step`, for loops that skip steps themselves."""
        if found_nonfinite:
            self.num_skipped += 1
            self._start_at(min(self._halvings + 1, 24))
            return
        self._num_finite += 1
        if self._halvings and self._num_finite >= self.patience:
            self._start_at(self._halvings - 1)

    @property
    def scale(self) -> float:
        """The loss scale at the start of the backward pass: a power of two, at most 1."""
        return 2.0**-self._halvings

    def state_dict(self) -> dict[str, int]:
        """The mutable state as JSON-able values."""
        return {"halvings": self._halvings, "num_finite": self._num_finite, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the state of `state_dict`."""
        self._start_at(state["halvings"])
        self._num_finite, self.num_skipped = state["num_finite"], state["num_skipped"]

    def _start_at(self, halvings: int) -> None:
        self._halvings, self._num_finite = halvings, 0
        scaling = scaling_of(self.model)
        assert scaling is not None
        numerics = replace(scaling.numerics, headroom=2.0**halvings)
        unit = scaled_tensor(scaling.unit.data_part, 1.0, role=Role.GRADIENT, numerics=numerics)
        for parameter in self.model.parameters():
            if isinstance(own := local(parameter), ScaledTensor):
                own.compute_in(numerics)
        changed = replace(scaling, numerics=numerics, unit=unit)
        self.model.lpconv_scaling = changed  # type: ignore[assignment]  # not a module or tensor


def gradients_are_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether no gradient, plain or scaled, holds Inf or NaN. Reads one boolean from the device.

    With sharded parameters all ranks must call this together, and they get the same answer.
    """
    pairs = [(p, p.grad) for p in parameters if p.grad is not None]
    if not pairs:
        return True
    finite = torch.stack([local(grad).isfinite().all() for _, grad in pairs]).all()  # a scale may be infinite
    if any(is_sharded(p) for p, _ in pairs):
        dist.all_reduce(number := finite.to(torch.int32), op=dist.ReduceOp.MIN)
        finite = number
    return bool(finite)


def check_gradients(model: nn.Module, batch: Mapping[str, Any], scale: Callable[[nn.Module], nn.Module]) -> None:
    """Raise `UnsupportedError` if a scaled copy of `model` computes another loss or other gradients, in fp32.

    `scale` scales a copy of the plain fp32 model, such as ``lambda m: scaled(m, method="unit")``. Both run in
    evaluation mode, without dropout. A gradient is wrong if its distance from the plain one exceeds 1e-3 of its norm;
    norms below 1/1000 of the largest count as that. The error names the wrong gradient nearest to the loss. Needs
    memory for one more copy of the weights and two sets of gradients.
    """
    loss, grads = _step(model, batch)
    our_loss, our_grads = _step(scale(copy.deepcopy(model)), batch)
    largest = max((float(g.norm()) for g in grads.values()), default=0.0)
    wrong = []
    for name, grad in grads.items():
        our_grad = our_grads.get(name)
        distance = float((grad if our_grad is None else our_grad - grad).norm()) / max(
            float(grad.norm()), largest / 1000, 1e-30
        )
        if not distance <= _TOLERANCE:
            wrong.append((name, distance))
    if wrong or not abs(our_loss - loss) <= _TOLERANCE * abs(loss):
        what = f"the gradient of `{wrong[-1][0]}` is {wrong[-1][1]:.2g} of its norm" if wrong else "the loss is"
        raise UnsupportedError(
            f"scaled tensors do not reproduce this model in fp32: {what} off the plain model's (loss {our_loss:.6g} "
            f"instead of {loss:.6g})",
            hint="choose a recipe without scaled tensors, such as collage-bf16, and please report the architecture",
        )


def _step(model: nn.Module, batch: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and the values of all gradients; clears gradients and restores the model's mode."""
    was_training = model.training
    model.eval()
    loss = model(**batch).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    values = {n: g.dequantize() if isinstance(g, ScaledTensor) else g.float() for n, g in grads.items()}
    model.zero_grad()
    model.train(was_training)
    return float(loss.detach()), values
