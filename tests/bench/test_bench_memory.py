"""Memory by part: a replay of allocations, and a step counted a second time by other means."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lpconv.bench.memory import BlockEvent, parts_at_peak, profile_step
from lpconv.train.memory import storage_bytes


def test_the_parts_are_those_alive_at_the_peak() -> None:
    events = [
        (1, 10, 500), (2, 20, 300), (3, 20, -300),  # an activation that stays, a temporary that goes
        (5, 30, 400), (6, 40, 200), (7, 10, -500), (8, 30, -400),  # behind the forward pass: temporary, gradient
        (9, 99, -1000),  # a block from before the step
    ]  # fmt: skip
    allocations = [BlockEvent(time_ns=t, address=a, size=s) for t, a, s in events]

    found = parts_at_peak(allocations, 4, {40: 200, 50: 30}, weights=100, optimizer=7)

    assert found.peak_bytes == 107 + 500 + 400 + 200 + 30
    assert (found.parts.activations, found.parts.gradients, found.parts.other) == (500, 230, 400)
    assert found.parts.total == found.peak_bytes
    assert found.saved_bytes == 500


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of storages, besides those `known`, that were alive at once, by weak references."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self.seen = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.seen:
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.alive -= size


def test_the_parts_sum_to_a_peak_counted_by_other_means() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(512, 256)

    def forward() -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    def finish(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    finish(forward())
    optimizer.zero_grad()
    weights = storage_bytes(model.parameters())
    momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
    state = storage_bytes(momentum)
    found = profile_step(
        forward, finish, weights=weights, optimizer=state, gradients=lambda: [p.grad for p in model.parameters()],
        device="cpu",
    )  # fmt: skip
    optimizer.zero_grad()
    with _Counting([x, *model.parameters(), *momentum]) as counted:
        finish(forward())

    assert weights == state == 4 * (2 * 256 * 1024 + 1024 + 256)
    assert found.parts.total == found.peak_bytes
    assert found.peak_bytes == pytest.approx(weights + state + counted.peak, rel=0.1)
    assert found.saved_bytes >= 4 * 512 * (1024 + 1024)  # the inputs of GELU and of the second Linear
