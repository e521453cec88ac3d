"""Run the repeated layers of a model one at a time on a text, and collect second moments Σ x xᵀ of their inputs x.

A model runs its layers in its own loop, with masks and positions that differ by architecture. So the model runs once
with layers that only record their arguments and return their input: this takes no longer than the embeddings, and no
architecture is named. After that every layer can run alone, any number of times, on hidden states that are stored in
between.

A layer is run once for all weights whose moments are wanted, or as often as memory requires: every pass begins moments
until there is no more room, and later passes collect the others.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError
from lpconv.layers import blocks_of
from lpconv.layouts.reader import StoredTensors
from lpconv.models.coded import CodedTensor, watched_products
from lpconv.models.load import load_from_files
from lpconv.models.tasks import architecture
from lpconv.storage.checkpoint import Checkpoint

_SAMPLED = 1024  # rows of a weight used for its output errors
_INDEX = re.compile(r"\.\d+\.")  # number of a layer, or of an expert in it
_HINT = "its weights can be rounded to nearest only: --rounding nearest"
# The index of a layer, its input state, and its other arguments.
_Call: TypeAlias = tuple[int, Any, tuple[Any, ...], dict[str, Any]]


@dataclass(kw_only=True, eq=False)
class Batch:
    """Windows that run together: the hidden state before the next layer, and each layer's other arguments."""

    state: Tensor
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class LayerWalk:
    """The layers of `model`, run one by one on some windows, `at_once` together.

    Memory is that of a hidden state: tokens by hidden size. Raises UnsupportedError for a model that does not run each
    of its layers once, on the output of the one before.
    """

    def __init__(self, model: Any, windows_NL: Tensor, *, at_once: int) -> None:
        self.layers = blocks_of(model)
        self._returns_tuple: bool | None = None
        self._model_name = type(model).__name__
        with torch.no_grad():
            self.batches = tuple(self._noted(model, ids_NL) for ids_NL in torch.split(windows_NL, at_once))

    @classmethod
    def from_files(cls, checkpoint: Checkpoint, stored: StoredTensors, windows_NL: Tensor, *, at_once: int) -> Self:
        """The walk through a checkpoint's model, whose matrices are read from `stored` as they are used.

        `checkpoint` has the config of the decoded values.
        """
        cls_of_model = architecture(checkpoint.config)
        model, missing = load_from_files(stored, model_class=cls_of_model, experts_implementation="eager")
        if missing:
            raise UnsupportedError(f"the source lacks the weight `{missing[0]}`", hint=_HINT)
        model.config.use_cache = False
        return cls(model, windows_NL, at_once=at_once)

    def run(self, index: int, batch: Batch) -> Tensor:
        args, kwargs = batch.arguments[index]
        with torch.no_grad():
            made = self.layers[index](batch.state, *args, **kwargs)
        output: Tensor = made[0] if isinstance(made, tuple) else made
        return output

    def advance(self, index: int) -> None:
        """Run layer `index` on every batch and keep its output as the new state."""
        for batch in self.batches:
            batch.state = self.run(index, batch)
            batch.arguments[index] = ((), {})  # masks and positions that no later layer needs

    def _noted(self, model: Any, ids_NL: Tensor) -> Batch:
        """A batch before the first layer, with the arguments of all layers."""
        called: list[_Call] = []
        with self._stand_ins(called):
            model.base_model(input_ids=ids_NL, attention_mask=torch.ones_like(ids_NL))
        states = [state for _, state, *_ in called]
        is_in_turn = [index for index, *_ in called] == [*range(len(self.layers))]
        if not is_in_turn or any(state is not states[0] for state in states):
            raise UnsupportedError(
                f"`{self._model_name}` does not run its layers once each, one on the output of the other",
                hint=_HINT,
            )
        return Batch(state=states[0], arguments=[(args, kwargs) for _, _, args, kwargs in called])

    @contextmanager
    def _stand_ins(self, called: list[_Call]) -> Iterator[None]:
        """Replace layers by functions that record their arguments in `called` and return their input."""

        def stand_in(index: int, forward: Any) -> Any:
            def note(state: Any = None, *args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
                state = hidden_states if state is None else state
                if self._returns_tuple is None:  # the other results of a layer differ by architecture
                    self._returns_tuple = isinstance(forward(state, *args, **kwargs), tuple)
                called.append((index, state, args, kwargs))
                return (state,) if self._returns_tuple else state

            return note

        try:
            for index, layer in enumerate(self.layers):
                layer.forward = stand_in(index, layer.forward)  # of this object only
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Matrix `index` of the stored tensor `name`, which holds `count`: one, or one for each expert."""

    name: str
    index: int
    count: int

    @property
    def kind(self) -> str:
        """The name within the layer, with a star for the number of an expert."""
        name = _INDEX.sub(".*.", _INDEX.sub(".", self.name, count=1))
        return name if self.count == 1 else f"{name}.*"


def matrices_of(layer: nn.Module) -> Iterator[Matrix]:
    for parameter in layer.parameters():
        if isinstance(parameter, CodedTensor):
            yield from _matrices_in(parameter)


def _matrices_in(weight: CodedTensor) -> Iterator[Matrix]:
    """The whole stored matrices that a weight consists of."""
    for piece in weight.pieces:
        size = math.prod(piece.form.shape[-2:])
        if size and piece.start % size == 0 and len(piece) % size == 0:
            for index in range(piece.start // size, piece.stop // size):
                yield Matrix(name=piece.form.name, index=index, count=piece.form.num_elements // size)


@dataclass(kw_only=True, eq=False)
class Moment:
    """Σ x xᵀ over the inputs x that some weights share. `is_transposed` weights are stored as [inputs, outputs]."""

    hessian_CC: Tensor
    is_transposed: bool
    num_inputs: int = 0
    shift_CC: Tensor | None = None  # Σ (x̃ - x) xᵀ, with x̃ the inputs in the source

    def add(self, x: Tensor) -> None:
        x_NC = x.reshape(-1, x.shape[-1])
        self.hessian_CC.addmm_(x_NC.t(), x_NC)
        self.num_inputs += len(x_NC)

    def add_shift(self, source_x: Tensor, x: Tensor) -> None:
        """Add the difference between the inputs in the source and the inputs `x`."""
        if self.shift_CC is None:
            self.shift_CC = torch.zeros_like(self.hessian_CC)
        x_NC = x.reshape(-1, x.shape[-1])
        self.shift_CC.addmm_((source_x.reshape(x_NC.shape) - x_NC).t(), x_NC)

    def oriented(self, stored: Tensor) -> Tensor:
        """A stored matrix, or its scales, as [outputs, inputs]."""
        return stored.t() if self.is_transposed else stored

    def squared_outputs(self, weight_RC: Tensor) -> float:
        """‖W X‖², the squared size of the outputs of a weight on these inputs."""
        return max(float(torch.mm(weight_RC, self.hessian_CC).mul_(weight_RC).sum(dtype=torch.float64)), 0.0)


def sampled_rows(weight_RC: Tensor) -> Tensor:
    """At most 1,024 evenly spaced rows, over which output errors are measured."""
    return weight_RC[:: -(-len(weight_RC) // _SAMPLED) or 1]


class _EnoughSeen(Exception):
    """Stops a layer whose remainder depends on weights that have yet to be rounded."""


class _Watch:
    """Collects the moments of the weights among `wanted` that a layer uses first, by matrix.

    These are the first weight that it multiplies by, others with the same input, and for experts all weights of that
    kind. The layer is stopped at another weight. The moments take at most `room` bytes, but there is at least one.
    """

    def __init__(self, wanted: Set[Matrix], room: int) -> None:
        self.moments: dict[Matrix, Moment] = {}
        self._wanted, self._room = wanted, room
        self._last: tuple[Tensor, Moment] | None = None
        self.inputs: dict[Matrix, Tensor] = {}  # of the batch, one matrix for each input; not those of experts

    def begin(self) -> None:
        self._last = None
        self.inputs = {}

    def __call__(self, x: Tensor, weight: CodedTensor, is_transposed: bool) -> None:
        matrices = [m for m in _matrices_in(weight) if m in self._wanted]
        if not matrices:
            return
        if self._last is not None and self._last[0] is x:  # already counted
            self._share(matrices, self._last[1])
            return
        moment = self.moments.get(matrices[0]) or self._begun(matrices, x.shape[-1], is_transposed)
        if moment is not None:
            moment.add(x)
            self._share(matrices, moment)
            self._last = x, moment
            if "*" not in matrices[0].kind:
                self.inputs[matrices[0]] = x

    def _share(self, matrices: Iterable[Matrix], moment: Moment) -> None:
        self.moments |= dict.fromkeys(matrices, moment)

    def _begun(self, matrices: list[Matrix], columns: int, is_transposed: bool) -> Moment | None:
        """A new moment for weights that are used for the first time; None if another pass collects it."""
        needed = 4 * columns**2
        if not self._is_next(matrices) or (self.moments and needed > self._room):
            return None
        self._room -= needed
        return Moment(hessian_CC=torch.zeros(columns, columns), is_transposed=is_transposed)

    def _is_next(self, matrices: list[Matrix]) -> bool:
        """Whether this pass collects the moment of these weights. Stops the layer if that has to wait."""
        kinds = {m.kind for m in self.moments}
        if not kinds or not kinds.isdisjoint(m.kind for m in matrices):
            return True
        if "*" in matrices[0].kind and any("*" in k for k in kinds):
            return False
        raise _EnoughSeen


def collected(
    walk: LayerWalk, index: int, wanted: Set[Matrix], room: int, source: LayerWalk | None = None
) -> dict[Matrix, Moment]:
    """The moments of the first weights among `wanted` that the walk's next layer, `index`, uses on all batches.

    They take at most `room` bytes, but there is at least one unless no input reaches these weights. With `source`, a
    walk through the source on the same text, moments get its shift too, except those of experts, whose tokens may be
    others there.
    """
    watch = _Watch(wanted, room)
    for number, batch in enumerate(walk.batches):
        watch.begin()
        _run_watched(walk, index, batch, watch)
        if source is not None and watch.inputs:
            _run_watched(source, index, source.batches[number], _Shifts(watch))
    return watch.moments


class _Shifts:
    """Adds the differences between the inputs of a batch and those in the source to the moments of the batch."""

    def __init__(self, watch: _Watch) -> None:
        self._moments, self._left = watch.moments, watch.inputs

    def __call__(self, x: Tensor, weight: CodedTensor, is_transposed: bool) -> None:
        for matrix in _matrices_in(weight):
            if matrix in self._left:
                self._moments[matrix].add_shift(x, self._left.pop(matrix))
        if not self._left:
            raise _EnoughSeen


def _run_watched(walk: LayerWalk, index: int, batch: Batch, watch: Callable[[Tensor, CodedTensor, bool], None]) -> None:
    with suppress(_EnoughSeen), watched_products(watch):
        walk.run(index, batch)
