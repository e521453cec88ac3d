"""Small parameters that are stepped together, with one buffer for each of their state entries.

A kernel call costs some 40 µs, as much as stepping 40,000 parameters. So small parameters of one group get their state
as views of common buffers, which a single call runs over; only gradients and weights, which belong to the model, are
copied next to each other for the call, and the weights back. The state dict does not change: a view is a tensor.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lpconv.optim.state import parts_of
from lpconv.optim.storage import Parts, Storage

Scratch: TypeAlias = dict[tuple[str, torch.dtype, torch.device], Tensor]
"""Buffers for weights and gradients, which all batches of an optimizer use in turn."""


class SharedState:
    """Moves the state of `params` into common buffers, and keeps these.

    The parameters have one dtype and device, have taken the same number of steps, and get gradients of one dtype.
    `states` are the optimizer's own dicts of them, whose entries become views of the buffers, in place.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        rule: str,
        storages: tuple[Storage, ...],
        gradient_dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        self.params, self._states = params, states
        buffers = {name: _share(name, states) for name in states[0]}
        self._entries = [tuple(state.values()) for state in states]
        self._steps = buffers["step"]
        size, p = sum(p.numel() for p in params), params[0]
        self.gradient = _scratch(scratch, "gradient", size, gradient_dtype, p.device)
        weight = _scratch(scratch, "weight", size, p.dtype, p.device)
        self.parts: Parts = parts_of(weight, buffers, rule, storages)
        self._gradients, self._weights = _pieces(self.gradient, params), _pieces(weight, params)

    def is_usable(self, states: Mapping[Tensor, Any], gradients: Sequence[Tensor]) -> bool:
        """Whether all parameters take part and nobody has replaced their state since, as loading a state dict does."""
        return len(gradients) == len(self.params) and gradients[0].dtype == self.gradient.dtype and all(
            states[p] is state and all(map(operator.is_, state.values(), entries))
            for p, state, entries in zip(self.params, self._states, self._entries, strict=True)
        )  # fmt: skip

    def count(self) -> int | None:
        """Count a step and return it; None, and nothing counted, where some parameters have been stepped alone."""
        if bool((self._steps != self._steps[0]).any()):
            return None
        self._steps += 1
        return int(self._steps[0])

    def gather(self, gradients: Sequence[Tensor]) -> None:
        """Fill `gradient` and the weight's part."""
        torch._foreach_copy_(self._gradients, list(gradients))
        torch._foreach_copy_(self._weights, list(self.params))

    def scatter(self) -> None:
        """Write the weights back; all other parts are the state itself."""
        torch._foreach_copy_(list(self.params), self._weights)


def _share(name: str, states: Sequence[dict[str, Any]]) -> Tensor:
    flat = torch.cat([state[name].reshape(-1) for state in states])
    for state, piece in zip(states, _pieces(flat, [state[name] for state in states]), strict=True):
        state[name] = piece
    return flat


def _pieces(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Consecutive views of `flat` with the shapes of `like`."""
    like = list(like)
    return [piece.view(t.shape) for piece, t in zip(torch.split(flat, [t.numel() for t in like]), like, strict=True)]


def _scratch(scratch: Scratch, role: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    buffer = scratch.get((role, dtype, device))
    if buffer is None or len(buffer) < size:
        buffer = scratch[role, dtype, device] = torch.empty(size, dtype=dtype, device=device)
    return buffer[:size]
