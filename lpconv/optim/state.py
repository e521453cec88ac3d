"""What an optimizer remembers of one parameter, by name, and how those tensors make up its parts."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lpconv.errors import InputError
from lpconv.optim.rules import RULES
from lpconv.optim.storage import Parts, Storage, new_parts

_COMPANION_NAMES = {
    Storage.PAIR: "residual",
    Storage.FP8_BF16: "residual",
    Storage.FP8_FP8: "residual",
    Storage.KAHAN: "compensation",
    Storage.MASTER: "master",
    Storage.FP8_MASTER: "master",
}


@functools.cache
def _state_names(rule: str, storages: tuple[Storage, ...]) -> tuple[tuple[str, ...], ...]:
    """The state entries that hold the weight and each moment: ("residual",), ("exp_avg",), ... for Collage.

    The weight itself is the parameter, so its own entries are its companion only.
    """
    weight = tuple(_COMPANION_NAMES[s] for s in storages[:1] if s in _COMPANION_NAMES)
    return weight, *(_moment_names(n, s) for n, s in zip(RULES[rule].moments, storages[1:], strict=True))


def new_state(p: Tensor, rule: str, storages: tuple[Storage, ...]) -> dict[str, Tensor]:
    """Step 0, moments of 0, and the weight's companion from the weight; like `p` in device, shape and placement."""
    state = {"step": torch.zeros((), dtype=torch.float32)}
    weight, *moments = _state_names(rule, storages)
    state |= zip(weight, new_parts(storages[0], p.detach())[1:], strict=True)
    for names, storage in zip(moments, storages[1:], strict=True):
        state |= zip(names, new_parts(storage, torch.zeros_like(p, dtype=storage.dtype)), strict=True)
    return state


def parts_of(p: Tensor, state: Mapping[str, Tensor], rule: str, storages: tuple[Storage, ...]) -> Parts:
    """The tensors themselves: writing to them changes the parameter and its state."""
    weight, *moments = _state_names(rule, storages)
    return (p.detach(), *[state[n] for n in weight]), *[tuple([state[n] for n in names]) for names in moments]


def check_state(state: Mapping[str, Any], rule: str, storages: tuple[Storage, ...]) -> None:
    """Raise InputError unless the state has the entries and dtypes of these storages."""
    weight, *moments = _state_names(rule, storages)
    expected: dict[str, torch.dtype | None] = {"step": torch.float32}
    expected |= dict.fromkeys(weight, storages[0].companion)
    for names, storage in zip(moments, storages[1:], strict=True):
        # A moment without a companion has one name.
        expected.update(zip(names, (storage.dtype, storage.companion), strict=False))
    found = {name: value.dtype for name, value in state.items()}
    if found != expected:
        raise InputError(
            f"the saved optimizer state does not fit: it holds {found}",
            hint=f"make the optimizer with the options of the saved run; these options need {expected}",
        )


def _moment_names(name: str, storage: Storage) -> tuple[str, ...]:
    return (name, f"{name}_{_COMPANION_NAMES[storage]}") if storage in _COMPANION_NAMES else (name,)
