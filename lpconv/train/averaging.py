"""Gradients averaged over processes in fp32, most of them while the backward pass still runs.

torch's DistributedDataParallel adds up gradients in their own dtype, and knows nothing of scales. So models with scaled
gradients, and models with 16-bit weights, are not wrapped in it. Its order is taken over: parameters lie in buckets,
those of the last layers first, and a bucket is sent off when its gradients are there. For each the processes agree on
scales, and then every gradient is added up by itself, in both passes of the same calls as without a backward pass
around them: so the bits do not depend on when that happens.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpconv.scaled import ScaledTensor, scaled_tensor, scaling_of

_BUCKET = 2**22  # elements: 16 MiB of fp32
_IN_FLIGHT = 4  # buckets that are added up at a time: their fp32 copies are what this takes of memory
_MIN_SCALE = 2.0**-126  # stands for the scale of a gradient that is known to be zero


def needs_averaging(model: nn.Module) -> bool:
    """Whether the gradients of a model are to be averaged here."""
    return scaling_of(model) is not None or any(p.dtype != torch.float32 for p in model.parameters())


class GradientAverage:
    """Replaces gradients by their means over all processes, begun inside of `backward` and ended by `finish`.

    The sum is taken in fp32 and rounded once, to the dtype of the gradient. Scaled gradients are first brought to the
    largest scale that any process has for them; scales are powers of two, so that this is exact, and no mean is larger
    than the largest of its terms. Inf and NaN of one process reach all.

    All processes send off the same buckets in the same order, whatever order gradients come in. A parameter that had no
    gradient in the step before is not waited for; where it has one again, that comes last.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        self._buckets = list(_buckets(trained[::-1]))
        self._is_running = False
        self._silent = set[int]()
        self._reset()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._there)

    @property
    def num_begun(self) -> int:
        """How many buckets have been sent off since the last `finish`."""
        return self._begun

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Send off buckets as they are there; other backward passes are let alone."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @torch.no_grad()
    def finish(self, parameters: Iterable[Any]) -> None:
        """Average what is left of these, and wait until every gradient is a mean."""
        for bucket in self._buckets[self._begun :]:
            self._send(bucket)
        self._silent = {id(p) for bucket in self._buckets for p in bucket} - self._found
        self._send([p for p in parameters if id(p) not in self._sent])
        self._send([])
        while self._adding:
            self._adding.popleft().write_back()
        self._reset()

    def _reset(self) -> None:
        self._begun = 0
        self._found, self._sent = set[int](), set[int]()
        self._agreeing: _UnderWay | None = None
        self._adding = deque[_UnderWay]()

    @torch.no_grad()
    def _there(self, parameter: Any) -> None:
        """The gradient of a parameter is there."""
        if not self._is_running:
            return
        self._found.add(id(parameter))
        while self._begun < len(self._buckets) and self._is_there(self._buckets[self._begun]):
            self._send([p for p in self._buckets[self._begun] if id(p) in self._found])
            self._begun += 1

    def _is_there(self, bucket: Sequence[Any]) -> bool:
        return all(id(p) in self._found or id(p) in self._silent for p in bucket)

    def _send(self, bucket: Sequence[Any]) -> None:
        """Let the processes agree on the scales of a bucket, and add up the one before it."""
        found = _UnderWay(bucket)
        self._sent.update(id(p) for p in found.holders)
        if self._agreeing is not None:
            self._agreeing.add_up()
            self._adding.append(self._agreeing)
        self._agreeing = found
        while len(self._adding) > _IN_FLIGHT:
            self._adding.popleft().write_back()


class _UnderWay:
    """Gradients of some parameters on their way to their means."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.holders = [p for p in parameters if p.grad is not None]
        self._sums: list[tuple[Tensor, Any]] = []
        if self.holders:
            self._own = torch.stack([_scale(p.grad) for p in self.holders])
            self._common = self._own.clone()
            self._agreed: Any = dist.all_reduce(self._common, op=dist.ReduceOp.MAX, async_op=True)

    def add_up(self) -> None:
        """Begin the sums, at the scales that were agreed on."""
        if not self.holders:
            return
        self._agreed.wait()
        shares = self._own / self._common / dist.get_world_size()
        for parameter, share in zip(self.holders, shares.unbind(), strict=True):
            gradient = parameter.grad
            data = gradient.data_part if isinstance(gradient, ScaledTensor) else gradient
            mean = data.float() * share
            self._sums.append((mean, dist.all_reduce(mean, async_op=True)))

    def write_back(self) -> None:
        """Wait for the sums, and put them in place of the gradients."""
        if not self.holders:
            return
        for parameter, scale, (mean, summed) in zip(self.holders, self._common.unbind(), self._sums, strict=True):
            summed.wait()
            gradient = parameter.grad
            if isinstance(gradient, ScaledTensor):
                data = mean.to(gradient.data_part.dtype)
                parameter.grad = scaled_tensor(data, scale.clone(), role=gradient.role, numerics=gradient.numerics)
            else:
                gradient.copy_(mean)


def _buckets(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Parameters in their order, as many together as have the elements of a bucket."""
    bucket, size = list[Any](), 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _scale(gradient: Tensor) -> Tensor:
    """In fp32 on the gradient's device; 1 for a plain one."""
    scale = gradient.scale if isinstance(gradient, ScaledTensor) else 1.0
    return torch.as_tensor(scale, dtype=torch.float32, device=gradient.device).clamp(min=_MIN_SCALE)
