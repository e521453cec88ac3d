"""Optimizer state: of one parameter, of small parameters together, and of the shard on this rank.

A kernel call costs some 40 µs, as much as stepping 40,000 parameters on a CPU and six million on an H100. So the state
of small parameters of one group is stored as views of shared buffers, which a single call processes. Only gradients
and weights, which belong to the model, are copied into buffers for the call, and the weights back. The state dict does
not change: a view is a tensor.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lpconv.errors import InputError, UnsupportedError
from lpconv.optim.kernel import COLUMNS
from lpconv.optim.rules import RULES
from lpconv.optim.storage import Parts, Storage, new_parts
from lpconv.shards import local

T = TypeVar("T")
_COMPANION_NAMES = dict.fromkeys((s for s in Storage if s.companion is not None), "residual")
_COMPANION_NAMES |= {Storage.KAHAN: "compensation", Storage.MASTER: "master", Storage.FP8_MASTER: "master"}
HOST_ENTRIES = {"step": (), "ratio_scale": (2,)}  # shapes of fp32 entries that are read on the host
Scratch: TypeAlias = dict[tuple[str, torch.dtype, torch.device], Tensor]  # reused by all batches of an optimizer


@functools.cache
def _state_names(rule: str, storages: tuple[Storage, ...]) -> tuple[tuple[str, ...], ...]:
    """Names of the state entries for the weight and each moment: ("residual",), ("exp_avg",), ... for Collage.

    The weight itself is the parameter, so only its companion has an entry.
    """
    weight = tuple(_COMPANION_NAMES[s] for s in storages[:1] if s in _COMPANION_NAMES)
    return weight, *(_moment_names(n, s) for n, s in zip(RULES[rule].moments, storages[1:], strict=True))


def new_state(p: Tensor, rule: str, storages: tuple[Storage, ...]) -> dict[str, Tensor]:
    """Initial state: step 0, zero moments, and the weight's companion; device, shape and placement as `p`."""
    host = HOST_ENTRIES if rule == "adamw-ratio" else ("step",)
    state = {name: torch.zeros(HOST_ENTRIES[name], dtype=torch.float32) for name in host}
    weight, *moments = _state_names(rule, storages)
    state |= zip(weight, new_parts(storages[0], p.detach())[1:], strict=True)
    for names, storage in zip(moments, storages[1:], strict=True):
        state |= zip(names, new_parts(storage, torch.zeros_like(p, dtype=storage.dtype)), strict=True)
    return state


def parts_of(p: Tensor, state: Mapping[str, Tensor], rule: str, storages: tuple[Storage, ...]) -> Parts:
    """The tensors that store a parameter and its moments; writing to them changes both."""
    weight, *moments = _state_names(rule, storages)
    return (p.detach(), *[state[n] for n in weight]), *[tuple([state[n] for n in names]) for names in moments]


def check_state(p: Tensor, state: Mapping[str, Any], rule: str, storages: tuple[Storage, ...]) -> None:
    """Raise InputError unless the state has the entries, dtypes and shapes of these storages of `p`."""
    empty = new_state(torch.empty(p.shape, dtype=p.dtype, device="meta"), rule, storages)
    needed, found = ({name: (x.dtype, tuple(x.shape)) for name, x in entries.items()} for entries in (empty, state))
    if found != needed:
        raise InputError(
            f"the saved optimizer state does not fit: it contains {found}",
            hint="create the optimizer with the options of the saved run, and its parameters in the same order; "
            f"the current options need {needed}",
        )


def _moment_names(name: str, storage: Storage) -> tuple[str, ...]:
    return (name, f"{name}_{_COMPANION_NAMES[storage]}") if storage in _COMPANION_NAMES else (name,)


class SharedState:
    """The state of small `params` in shared buffers.

    The parameters have one dtype and device, the same number of steps, and gradients of one dtype. `states` are their
    state dicts in the optimizer, whose entries are replaced by views of the buffers.
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
        size, p = sum(p.numel() for p in params), params[0]
        size += -size % COLUMNS  # pad to whole rows
        buffers = {name: _share(name, states, 0 if name in HOST_ENTRIES else size) for name in states[0]}
        self._entries = [tuple(state.values()) for state in states]
        self._steps = buffers["step"]
        self._scales = buffers.get("ratio_scale", self._steps.new_zeros(2)).view(-1, 2)
        self.gradient = _scratch(scratch, "gradient", size, gradient_dtype, p.device)
        weight = _scratch(scratch, "weight", size, p.dtype, p.device)
        self.parts: Parts = parts_of(weight, buffers, rule, storages)
        self._gradients, self._weights = _pieces(self.gradient, params), _pieces(weight, params)

    def is_usable(self, states: Mapping[Tensor, Any], gradients: Sequence[Tensor]) -> bool:
        """Whether all parameters have a gradient and their state was not replaced, as loading a state dict does."""
        return len(gradients) == len(self.params) and gradients[0].dtype == self.gradient.dtype and all(
            states[p] is state and all(map(operator.is_, state.values(), entries))
            for p, state, entries in zip(self.params, self._states, self._entries, strict=True)
        )  # fmt: skip

    def count(self) -> int | None:
        """Count a step and return it, or return None, counting nothing, if some parameters were stepped alone."""
        if bool((self._steps != self._steps[0]).any() or (self._scales != self._scales[0]).any()):
            return None
        self._steps += 1
        return int(self._steps[0])

    def gather(self, gradients: Sequence[Tensor]) -> None:
        torch._foreach_copy_(self._gradients, list(gradients))
        torch._foreach_copy_(self._weights, list(self.params))

    def scatter(self) -> None:
        """Copy the weights back; all other parts are views of the state."""
        torch._foreach_copy_(list(self.params), self._weights)


def batches_of(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Split items into consecutive batches, each of which ends where their sizes reach `limit`."""
    batch, size = list[T](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _share(name: str, states: Sequence[dict[str, Any]], size: int) -> Tensor:
    pieces = [state[name].reshape(-1) for state in states]
    flat = torch.cat([*pieces, pieces[0].new_zeros(max(0, size - sum(map(len, pieces))))])
    for state, piece in zip(states, _pieces(flat, [state[name] for state in states]), strict=True):
        state[name] = piece
    return flat


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive views of the start of `flat` with the shapes of `like`."""
    sizes = [t.numel() for t in like]
    return [piece.view(t.shape) for piece, t in zip(torch.split(flat[: sum(sizes)], sizes), like, strict=True)]


def _scratch(scratch: Scratch, role: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    buffer = scratch.get((role, dtype, device))
    if buffer is None or len(buffer) < size:
        buffer = scratch[role, dtype, device] = torch.empty(size, dtype=dtype, device=device)
    return buffer[:size]


def local_gradient(p: Tensor, name: str) -> Tensor:
    """The local part of the gradient of `p`. Raises UnsupportedError if it is sparse or complex."""
    gradient = p.grad
    assert gradient is not None
    if gradient.layout != torch.strided or not gradient.is_floating_point():
        raise UnsupportedError(
            f"parameter `{name}` has a {gradient.layout} gradient of {gradient.dtype}",
            hint="make the gradient dense (for embeddings, pass sparse=False)",
        )
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and gradient.placements != p.placements:
        gradient = gradient.redistribute(p.device_mesh, p.placements)
    return local(gradient)


@contextmanager
def flat_parts(parts: Parts) -> Iterator[Parts]:
    """Yield the local parts of a parameter as 1-D contiguous tensors; copies are written back on exit."""
    sources = [[local(t) for t in tensors] for tensors in parts]
    flats = tuple(tuple(t.reshape(-1) for t in tensors) for tensors in sources)
    yield flats
    for source, one in ((s, f) for many in zip(sources, flats, strict=True) for s, f in zip(*many, strict=True)):
        if not source.is_contiguous():
            source.copy_(one.view(source.shape))


def all_finite(gradients: Sequence[Tensor], device: torch.device) -> bool:
    """Whether no gradient on any rank has Inf or NaN, judged by their sums; a sum that overflows counts as Inf.

    Synchronises with `device`, where the flags are combined. With torch.distributed running all ranks must call this
    together, also those without gradients, and they get the same answer.
    """
    sums = [g.sum(dtype=torch.float32).to(device) for g in gradients]
    finite = torch.stack([torch.zeros((), device=device), *sums]).isfinite().all().to(torch.float32)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite)
