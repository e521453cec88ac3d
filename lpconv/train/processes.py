"""The processes that train together: one, or those started by torchrun; they average gradients in fp32.

torch's DistributedDataParallel sums gradients in their own dtype and does not know scales. So models with scaled
gradients, and models with 16-bit weights, are not wrapped in it. Its order is used: parameters are in buckets, those of
the last layers first, and a bucket is sent when its gradients are complete, mostly during the backward pass. For each
bucket the processes agree on scales, and then every gradient is summed separately, with the same calls as without
overlap, so the bits do not depend on timing.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lpconv.optim.state import batches_of
from lpconv.scaled import ScaledTensor, scaled_tensor, scaling_of

_BUCKET = 2**22  # elements: 16 MiB in fp32
_IN_FLIGHT = 4  # buckets summed at a time; their fp32 copies determine the memory that this needs
_MIN_SCALE = 2.0**-126  # in place of the scale of an all-zero gradient


def is_main_process() -> bool:
    """Whether this process writes files; only the first one does."""
    return bool(_state().is_main_process)


def num_processes() -> int:
    return int(_state().num_processes)


def wait_for_all() -> None:
    _state().wait_for_everyone()


def mesh() -> DeviceMesh:
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (num_processes(),))


def backend() -> str | None:
    """Communication backend: gloo on CPUs, torch's choice on GPUs, None for one process."""
    return "gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.cuda.is_available() else None


def _state() -> Any:
    """accelerate's shared state. It is created on first use, which joins the process group."""
    from accelerate import PartialState  # takes seconds to import, and --help does not need it

    options = {"backend": backend()} if backend() else {}
    return PartialState(cpu=not torch.cuda.is_available(), **options)


def needs_averaging(model: nn.Module) -> bool:
    """Whether the gradients of a model are averaged here rather than by DistributedDataParallel."""
    return scaling_of(model) is not None or any(p.dtype != torch.float32 for p in model.parameters())


class GradientAverage:
    """Replaces gradients by their means over all processes: starts during `backward` and completes in `finish`.

    The sum is computed in fp32 and rounded once, to the dtype of the gradient. Scaled gradients are first brought to
    the largest scale of any process; scales are powers of two, so this is exact, and no mean exceeds its largest term.
    Inf and NaN of one process reach all.

    All processes send the same buckets in the same order, whatever the order of gradients. A parameter without a
    gradient in the previous step is not waited for; if it has one again, that is sent last.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        self._buckets = list(batches_of(trained[::-1], lambda p: p.numel(), _BUCKET))
        self._is_running = False
        self._silent = set[int]()
        self._reset()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Send buckets as they become complete during the block; other backward passes are not affected."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @torch.no_grad()
    def finish(self, parameters: Iterable[Any]) -> None:
        """Average the remaining gradients, and wait until every gradient is a mean."""
        for bucket in self._buckets[self.num_begun :]:
            self._send(bucket)
        self._silent = {id(p) for bucket in self._buckets for p in bucket} - self._found
        self._send([p for p in parameters if id(p) not in self._sent])
        if self._pending:
            self._pending[-1].add_up()
        while self._pending:
            self._pending.popleft().write_back()
        self._reset()

    def _reset(self) -> None:
        self.num_begun = 0  # buckets sent since the last `finish`
        self._found, self._sent = set[int](), set[int]()
        self._pending = deque[_PendingSum]()  # the last one agrees on scales, the others are summed

    @torch.no_grad()
    def _on_gradient(self, parameter: Any) -> None:
        if not self._is_running:
            return
        self._found.add(id(parameter))
        for bucket in self._buckets[self.num_begun :]:
            if not all(id(p) in self._found or id(p) in self._silent for p in bucket):
                break
            self._send([p for p in bucket if id(p) in self._found])
            self.num_begun += 1

    def _send(self, bucket: Sequence[Any]) -> None:
        """Start agreeing on the scales of a bucket, and start the sums of the previous bucket."""
        holders = [p for p in bucket if p.grad is not None]
        if not holders:
            return
        self._pending.append(_PendingSum(holders))
        self._sent.update(map(id, holders))
        if len(self._pending) > 1:
            self._pending[-2].add_up()
        if len(self._pending) > _IN_FLIGHT + 1:
            self._pending.popleft().write_back()


class _PendingSum:
    def __init__(self, holders: Sequence[Any]) -> None:
        self.holders = holders
        self._sums: list[tuple[Tensor, Any]] = []
        self._own = torch.stack([_scale(p.grad) for p in holders])
        self._common = self._own.clone()
        self._agreed: Any = dist.all_reduce(self._common, op=dist.ReduceOp.MAX, async_op=True)

    def add_up(self) -> None:
        self._agreed.wait()
        shares = self._own / self._common / dist.get_world_size()
        for parameter, share in zip(self.holders, shares.unbind(), strict=True):
            gradient = parameter.grad
            data = gradient.data_part if isinstance(gradient, ScaledTensor) else gradient
            mean = data.float() * share
            self._sums.append((mean, dist.all_reduce(mean, async_op=True)))

    def write_back(self) -> None:
        for parameter, scale, (mean, summed) in zip(self.holders, self._common.unbind(), self._sums, strict=True):
            summed.wait()
            gradient = parameter.grad
            if isinstance(gradient, ScaledTensor):
                data = mean.to(gradient.data_part.dtype)
                parameter.grad = scaled_tensor(data, scale.clone(), role=gradient.role, numerics=gradient.numerics)
            else:
                gradient.copy_(mean)


def _scale(gradient: Tensor) -> Tensor:
    """The scale of a gradient in fp32 on its device; 1 for a plain gradient."""
    scale = gradient.scale if isinstance(gradient, ScaledTensor) else 1.0
    return torch.as_tensor(scale, dtype=torch.float32, device=gradient.device).clamp(min=_MIN_SCALE)
