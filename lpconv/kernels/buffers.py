"""Scratch memory that is kept: the first touch of fresh memory costs as much as what the kernels do with it."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Buffers"]


class Buffers(threading.local):
    """Tensors that each thread makes once for a device, by `make`, and keeps. Their contents are whatever was left."""

    def __init__(self, make: Callable[[torch.device], tuple[Tensor, ...]]) -> None:
        self._make = make
        self._made: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """This thread's tensors on `device`."""
        if device not in self._made:
            with torch.inference_mode(False):  # else, first made there, they could not be written elsewhere
                self._made[device] = self._make(device)
        return self._made[device]
