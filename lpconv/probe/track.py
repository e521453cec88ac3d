"""Record a model while it trains: `with track(model, every=50) as t: ...; print(t.table())`.

Histograms are computed during the pass, so only counts are kept. The hooks of a layer are attached at the start of a
recorded step and removed at the next step, so other steps pay for one hook on the whole model.

The gradient of a layer's input is this layer's own contribution, before autograd adds the other users of the same
tensor, because a low-precision backward pass would round that product. To see it, each layer receives a view of its
input. Values are recorded as the model computes them: under autocast or in a bfloat16 model they are already rounded.
Of scaled tensors the data are recorded, because the format has to hold those.
"""

import dataclasses
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.formats.histogram import ExponentHistogram
from lpconv.kernels.histogram import count, prepare
from lpconv.layers import weighted_modules
from lpconv.probe.advice import table
from lpconv.probe.record import ROLES, ProbedTensor, ProbeResult
from lpconv.scaled.tensor import data_part

_MAX_PENDING = 64  # counts waiting to be added up; 40 MiB with 16 threads


def track(model: nn.Module, *, every: int = 50, fixed_weights: bool = False) -> "Tracker":
    """Return a context manager that records every `every`-th forward pass of `model` and its backward pass.

    It records the layers that own a floating-point weight of at least two dimensions (Linear, GPT-2's Conv1D,
    embeddings, convolutions). A weight shared by several layers is recorded under the first. Forward passes without
    gradients are not counted as steps. Compiled modules do not call hooks: track the model before compiling it.
    `fixed_weights` promises that no weight changes inside the context: each is then read once and counted for every
    recorded step. (torch cannot tell: writing through `.data` does not change a tensor's version.)
    """
    if every < 1:
        raise UsageError(f"every={every} is out of range", hint="pass 1 or more")
    return Tracker(model, every, fixed_weights)


class Tracker:
    """Hooks on a model and the statistics that they collect; created by `track`."""

    def __init__(self, model: nn.Module, every: int, fixed_weights: bool) -> None:
        self.model = model
        self.every = every
        self._fixed: dict[str, ExponentHistogram] | None = {} if fixed_weights else None
        self.steps_seen = 0
        self.steps_recorded = 0
        self._histograms: dict[tuple[str, str], ExponentHistogram] = {}
        self._pending: list[tuple[str, str, Callable[[], ExponentHistogram]]] = []
        self._last_input: tuple[weakref.ref[Tensor], int, Callable[[], ExponentHistogram]] | None = None
        self._root, self._layer_hooks = ExitStack(), ExitStack()
        self._recording_s = 0.0
        self._started_s = 0.0
        self._elapsed_s = 0.0

    def __enter__(self) -> "Tracker":
        prepare(self.model.parameters())
        self._root.enter_context(self.model.register_forward_pre_hook(self._begin_step))
        self._started_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        with self._time_overhead():
            self._fold()
        self._elapsed_s += time.perf_counter() - self._started_s
        self._layer_hooks.close()
        self._root.close()

    def result(self) -> ProbeResult:
        """Everything recorded so far, in the order of the model's layers."""
        self._fold()
        layers = [name for name, _ in _tracked_layers(self.model)]
        tensors = tuple(
            ProbedTensor(layer=layer, role=role, histogram=self._histograms[layer, role].to_dict())
            for layer in layers
            for role in ROLES
            if (layer, role) in self._histograms
        )
        return ProbeResult(
            tensors=tensors,
            steps_seen=self.steps_seen,
            steps_recorded=self.steps_recorded,
            overhead=self.overhead,
            options={"every": self.every},
        )

    @property
    def overhead(self) -> float:
        """Time spent recording divided by the rest of the time in the context."""
        rest = self._elapsed_s - self._recording_s
        return self._recording_s / rest if rest > 0 else 0.0

    def table(self, format: str = "fp16", *, log2_loss_scale: int = 0, limit: int = 10) -> str:
        """The effect of `format` on the recorded tensors as lines of text, worst first."""
        return table(self.result(), format, log2_loss_scale=log2_loss_scale, limit=limit)

    def _begin_step(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._layer_hooks.close()
        if not torch.is_grad_enabled():
            return
        if self.steps_seen % self.every == 0:
            with self._time_overhead():
                self._add_layer_hooks()
            self.steps_recorded += 1
        self.steps_seen += 1

    def _add_layer_hooks(self) -> None:
        recorded: set[int] = set()
        for name, layer in _tracked_layers(self.model):
            self._layer_hooks.enter_context(layer.register_forward_pre_hook(partial(self._see_input, name)))
            self._layer_hooks.enter_context(layer.register_forward_hook(partial(self._see_output, name)))
            weight = layer.weight
            if isinstance(weight, Tensor) and id(weight) not in recorded:
                recorded.add(id(weight))
                self._record_weight(name, weight)
                self._watch(weight, name, "weight_grad")

    def _see_input(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None  # token ids, or an input passed by keyword
        self._record_input(name, args[0])
        own = args[0].view_as(args[0])
        self._watch(own, name, "grad_input")
        return (own, *args[1:])

    def _see_output(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            self._record(name, "output", output)
            self._watch(output, name, "grad_output")

    def _watch(self, tensor: Tensor, name: str, role: str) -> None:
        """Record the gradient of `tensor` when it is computed in this step."""
        if tensor.requires_grad:
            handle = tensor.register_hook(lambda grad: self._record(name, role, grad))  # type: ignore[no-untyped-call]
            self._layer_hooks.enter_context(handle)

    def _record_input(self, name: str, tensor: Tensor) -> None:
        """Record a layer's input. An input that several layers share (query, key, value) is counted once."""
        last = self._last_input
        with self._time_overhead():
            if last is None or last[0]() is not tensor or last[1] != tensor._version:
                last = self._last_input = weakref.ref(tensor), tensor._version, _count(tensor)
            self._add(name, "input", last[2])

    def _record_weight(self, name: str, weight: Tensor) -> None:
        if self._fixed is None:
            self._record(name, "weight", weight)
            return
        if name not in self._fixed:
            self._fixed[name] = _count(weight)()
        self._add(name, "weight", partial(self._fixed.__getitem__, name))

    def _record(self, name: str, role: str, tensor: Tensor) -> None:
        with self._time_overhead():
            self._add(name, role, _count(tensor))

    def _add(self, name: str, role: str, histogram: Callable[[], ExponentHistogram]) -> None:
        self._pending.append((name, role, histogram))
        if len(self._pending) >= _MAX_PENDING:
            self._fold()

    def _fold(self) -> None:
        for name, role, histogram in self._pending:
            new, before = histogram(), self._histograms.get((name, role))
            self._histograms[name, role] = new if before is None else before + new
        self._pending.clear()

    @contextmanager
    def _time_overhead(self) -> Iterator[None]:
        start = time.perf_counter()
        nested = self._recording_s
        yield
        self._recording_s = nested + time.perf_counter() - start  # includes the time of nested records, once


def _count(tensor: Tensor) -> Callable[[], ExponentHistogram]:
    return count(data_part(tensor))


def _tracked_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in weighted_modules(model).items()
        if module.weight.ndim >= 2 and module.weight.is_floating_point()
    ]


def model_loss(output: Any) -> Tensor:
    """The loss that a transformers model computed itself. Raises UsageError if it had no labels."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError("the model returned no loss", hint="add `labels` to the batches")
    return loss


def target_loss(output: Any, *, seed: int) -> Tensor:
    """A loss for models without a language-model head: mean square distance of the first output to N(0, 1) targets.

    The mean square of the output alone would not work: a final normalisation keeps it constant, so its gradient is only
    rounding noise. The targets are the same in every step.
    """
    first: Tensor = output[0]
    targets = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed))
    return (first - targets).square().mean()


def probe(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    steps: int | None = None,
    every: int = 1,
    loss: Callable[[Any], Tensor] = model_loss,
) -> ProbeResult:
    """Run `steps` batches (None: all) forward and backward, and record the tensors of every `every`-th batch.

    Each batch holds the model's keyword arguments; `loss` computes a scalar from the model's output, by default the
    model's own loss, which needs labels. Weights do not change; gradients are freed after each batch, and the model
    keeps its training or evaluation mode. Raises UsageError if there is no batch or no loss.
    """
    losses = []
    with track(model, every=every, fixed_weights=True) as tracker:
        for batch in itertools.islice(batches, steps):
            value = loss(model(**batch))
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(float(value.detach()))
            model.zero_grad(set_to_none=True)
    if not losses:
        raise UsageError("there are no batches to probe with", hint="pass at least one batch")
    return dataclasses.replace(tracker.result(), losses=tuple(losses))
