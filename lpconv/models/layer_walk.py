"""Run the repeated layers of a model one at a time on a text, and stop before products with some of their weights.

A model runs its layers in its own loop, with masks and positions that differ by architecture. So the model runs once
with layers that only record their arguments and return their input: this takes no longer than the embeddings, and no
architecture is named. After that every layer can run alone, any number of times, on hidden states that are stored in
between.

A run through a layer has a thread of its own, which waits before each product with a wanted weight until the weight has
its final values. So every product is computed once, with inputs that all earlier weights of the layer have made. Only
one thread works at a time. Runs whose activations take too much memory are given up, and begin again when their next
product is wanted.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore, Thread
from typing import Any, Self, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError
from lpconv.layers import block_lists
from lpconv.layouts.reader import StoredTensors
from lpconv.models.coded import CodedTensor, watched_products
from lpconv.models.inputs import read_windows
from lpconv.models.load import load_from_files, without_cache
from lpconv.models.tasks import architecture
from lpconv.storage.checkpoint import Checkpoint

_HINT = "its weights can be rounded to nearest only: --rounding nearest"
_GLANCE = 16  # tokens that show which layers a text reaches
_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # of a layer, without the state
_Stack: TypeAlias = tuple[Tensor, dict[nn.Module, _Arguments]]  # the state before the first layer, and the arguments


@dataclass(kw_only=True, eq=False)
class Batch:
    """Windows that run together: the state before the next layer, and other arguments of it and of later layers.

    These are layers of one stack. `results` are those of the last layers of earlier stacks.
    """

    ids_NL: Tensor
    state: Tensor = field(init=False)
    arguments: dict[nn.Module, _Arguments] = field(init=False)
    results: dict[nn.Module, Any] = field(default_factory=dict)


class LayerWalk:
    """The layers of `model` that a text reaches, run one by one on some windows, `at_once` together.

    They are one stack, or several between which the model computes something, such as an encoder and a decoder. Memory
    is that of a hidden state for each stack: tokens by hidden size. Raises UnsupportedError for a model that runs a
    layer several times, or none.
    """

    def __init__(self, model: Any, windows_NL: Tensor, *, at_once: int) -> None:
        self._model = model
        self._others: dict[nn.Module, tuple[Any, ...] | None] = {}  # results after the state, if they have no tensors
        self.layers = [layer for layers in block_lists(model) for layer in layers]
        stacks = [[*layers] for _, layers in self._recorded(Batch(ids_NL=windows_NL[:1, :_GLANCE]))]
        self._lasts = [stack[-1] for stack in stacks]  # of the stack that has begun, and of later ones
        self.layers = [layer for stack in stacks for layer in stack]
        if not self.layers:
            raise UnsupportedError(f"`{type(model).__name__}` has no list of layers that text reaches", hint=_HINT)
        self.batches = tuple(Batch(ids_NL=ids_NL) for ids_NL in torch.split(windows_NL, at_once))
        self._begin()

    @classmethod
    def from_files(cls, checkpoint: Checkpoint, stored: StoredTensors, windows_NL: Tensor, *, at_once: int) -> Self:
        """The walk through a checkpoint's model, whose matrices are read from `stored` as they are used.

        `checkpoint` has the config of the decoded values.
        """
        cls_of_model = architecture(checkpoint.config)
        model, missing = load_from_files(stored, model_class=cls_of_model, experts_implementation="eager")
        if missing:
            raise UnsupportedError(f"the source lacks the weight `{missing[0]}`", hint=_HINT)
        return cls(without_cache(model), windows_NL, at_once=at_once)

    def run(self, index: int, batch: Batch) -> Any:
        """The result of layer `index`, the next one, on a batch: the new state, or a tuple that begins with it."""
        args, kwargs = batch.arguments[self.layers[index]]
        with torch.no_grad():
            return self.layers[index](batch.state, *args, **kwargs)

    def watch(self, index: int, wanted: "Set[Matrix]", note: Callable[["Product"], None]) -> None:
        """Run layer `index` on every batch, and call `note` with every product with a matrix in `wanted`."""

        def watch(x: Tensor, weight: CodedTensor, is_transposed: bool) -> None:
            if (product := Product.of(x, weight, wanted, is_transposed=is_transposed)) is not None:
                note(product)

        with watched_products(watch):
            for batch in self.batches:
                self.run(index, batch)

    def leave(self, index: int, results: Iterable[Any]) -> None:
        """Keep the results of layer `index` on all batches as the states before the next layer."""
        layer = self.layers[index]
        for batch, result in zip(self.batches, results, strict=True):
            del batch.arguments[layer]  # masks and positions that no later layer needs
            batch.state = result[0] if isinstance(result, tuple) else result
            if layer is self._lasts[0]:
                batch.results[layer] = result
        if layer is self._lasts[0] and len(self._lasts) > 1:
            del self._lasts[0]
            self._begin()

    def _begin(self) -> None:
        for batch in self.batches:
            *_, (batch.state, batch.arguments) = self._recorded(batch, last=self._lasts[0])

    def _recorded(self, batch: Batch, last: nn.Module | None = None) -> list[_Stack]:
        """The stacks in which the model calls layers while it reads a batch, until it comes to `last`.

        The last layers of earlier stacks return their results. Others return their input, as another tensor that shows
        where it goes. A layer that makes tensors for later layers, such as T5's bias of positions, is the last one.
        """
        stacks: list[_Stack] = []
        output: Any = None
        others: tuple[Any, ...] | None = None

        def note(
            layer: nn.Module, forward: Any, state: Any = None, *args: Any, hidden_states: Any = None, **kwargs: Any
        ) -> Any:
            nonlocal output, others
            state = hidden_states if state is None else state
            if any(layer in arguments for _, arguments in stacks):
                name = type(self._model).__name__
                raise UnsupportedError(f"`{name}` does not run its layers once each", hint=_HINT)
            if output is None or state is not output:
                stacks.append((state, {}))
                is_done = layer in batch.results
                others = None if is_done else self._others_of(layer, forward, state, *args, **kwargs)
            stacks[-1][1][layer] = args, kwargs
            if layer is last:
                raise _AllRecorded
            given = {id(x) for x in (*args, *kwargs.values())}
            is_last = any(isinstance(x, Tensor) and id(x) not in given for x in others or ())
            passed = state.detach()
            output = None if is_last else passed
            return batch.results.get(layer, passed if others is None else (passed, *others))

        try:
            for layer in self.layers:
                layer.forward = partial(note, layer, layer.forward)  # of this object only
            with torch.no_grad(), suppress(_AllRecorded):
                read_windows(self._model, batch.ids_NL)
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)
        return stacks

    def _others_of(self, layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """The results of a layer after the state; None if it returns no tuple."""
        if layer not in self._others:
            result = forward(*args, **kwargs)
            others = tuple(result[1:]) if isinstance(result, tuple) else None
            if any(isinstance(x, Tensor) for x in others or ()):
                return others
            self._others[layer] = others
        return self._others[layer]


class _AllRecorded(Exception):
    """Stops a model whose remaining layers are not asked for."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Matrix `index` of the stored tensor `name`, which holds `count`: one, or one for each expert."""

    name: str
    index: int
    count: int

    @property
    def is_expert(self) -> bool:
        return self.count > 1 or ".experts." in self.name


def matrices_of(layer: nn.Module) -> dict[Matrix, tuple[bool, int, int]]:
    """Matrices, with keys in the order of a batch that has come to the experts. A batch may skip some experts."""
    places: dict[Matrix, tuple[bool, int, int]] = {}
    for weight in layer.parameters():
        matrices = [*_matrices_in(weight)] if isinstance(weight, CodedTensor) else []
        for i, m in enumerate(matrices):
            expert = i * len(weight) // len(matrices) if weight.ndim > 2 else 0
            places[m] = not m.is_expert, expert, len(places)
    return places


def _matrices_in(weight: CodedTensor) -> Iterator[Matrix]:
    """The whole stored matrices that a weight consists of."""
    for piece in weight.pieces:
        size = math.prod(piece.form.shape[-2:])
        if size and piece.start % size == 0 and len(piece) % size == 0:
            for index in range(piece.start // size, piece.stop // size):
                yield Matrix(name=piece.form.name, index=index, count=piece.form.num_elements // size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """The next product of a run: `x` times a weight that consists of `matrices`.

    `is_transposed` weights are stored as [inputs, outputs].
    """

    x: Tensor
    matrices: tuple[Matrix, ...]
    is_transposed: bool

    @classmethod
    def of(cls, x: Tensor, weight: CodedTensor, wanted: Set[Matrix], *, is_transposed: bool) -> Self | None:
        """The product of `x` and a weight with a matrix in `wanted`; otherwise None."""
        matrices = tuple(m for m in _matrices_in(weight) if m in wanted)
        return cls(x=x, matrices=matrices, is_transposed=is_transposed) if matrices else None


class _Stopped(BaseException):
    """Ends the thread of a run that is given up. Not an Exception: models may catch those."""


class _Run:
    """One batch on its way through a layer. It waits before every product with a matrix in `wanted`."""

    def __init__(self, forward: Callable[[], Any], wanted: Set[Matrix]) -> None:
        self.product: Product | None = None
        self.output: Any = None
        self._forward, self._wanted = forward, wanted
        self._error: BaseException | None = None
        self._is_stopped = False
        self._turn, self._answer = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._work, daemon=True)

    @property
    def is_at_experts(self) -> bool:
        return self.product is not None and self.product.matrices[0].is_expert

    def go_on(self) -> Any:
        """Run to the next wanted product, or to the end. Return the output, None before the end."""
        if self.output is not None or (self.product is not None and not self._wanted.isdisjoint(self.product.matrices)):
            return self.output
        if not self._thread.ident:
            self._thread.start()
        self.product = None
        self._turn.release()
        self._answer.acquire()
        if self._error is not None:
            raise self._error
        return self.output

    def stop(self) -> None:
        """End the thread and free the activations."""
        if self._thread.ident:
            self._is_stopped = True
            self._turn.release()
            self._thread.join()

    def _work(self) -> None:
        self._turn.acquire()
        try:
            with watched_products(self._wait):
                self.output = self._forward()
        except _Stopped:
            pass
        except BaseException as e:  # for the thread that waits
            self._error = e
        self._answer.release()

    def _wait(self, x: Tensor, weight: CodedTensor, is_transposed: bool) -> None:
        self.product = Product.of(x, weight, self._wanted, is_transposed=is_transposed)
        if self.product is None:
            return
        self._answer.release()
        self._turn.acquire()
        if self._is_stopped:
            raise _Stopped


class LayerRun:
    """All batches on their way through layer `index` of a walk, each waiting before its next product with a matrix in
    `wanted`.

    At most `held` batches keep their activations while they wait; others run again from the layer's input. Batches that
    wait before an expert keep them all, because there is a product for each expert.
    """

    def __init__(self, walk: LayerWalk, index: int, wanted: Iterable[Matrix], *, held: int) -> None:
        self.is_last = index + 1 == len(walk.layers)
        self._walk, self._index, self._held, self._wanted = walk, index, held, set(wanted)
        self._place = matrices_of(walk.layers[index])
        self._runs = [self._begun(batch) for batch in walk.batches]
        self._inputs: list[Callable[[], Tensor | None]] = []  # of the last products, as far as they are still in use

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            run.stop()

    def next_matrices(self) -> tuple[Matrix, ...]:
        """The wanted matrices of the next weight, none at the end. No other batch comes to them later."""
        for run in self._runs[: self._held]:
            run.go_on()
        if any(run.is_at_experts for run in self._runs):
            for run in self._runs:
                run.go_on()
        waiting = [run.product.matrices for run in self._runs if run.product is not None]
        return min(waiting, key=lambda matrices: self._place[matrices[0]], default=())

    def has_same_inputs(self, matrices: tuple[Matrix, ...]) -> bool:
        """Whether these matrices, the next ones, have the inputs of the last products."""
        inputs = [run.product.x for run in self._runs if run.product is not None and run.product.matrices == matrices]
        return [*map(id, inputs)] == [id(last()) for last in self._inputs]

    def products(self, matrices: tuple[Matrix, ...]) -> Iterator[tuple[int, Product]]:
        """The products with these matrices, and the number of the batch of each."""
        self._inputs.clear()
        for number in range(len(self._runs)):
            product = self.product(number, matrices)
            if product is not None:
                yield number, product

    def product(self, number: int, matrices: tuple[Matrix, ...]) -> Product | None:
        """The product of batch `number` with these matrices; None if the batch does not come to them next."""
        run = self._runs[number]
        run.go_on()
        product = run.product if run.product is not None and run.product.matrices == matrices else None
        if number >= self._held and not run.is_at_experts:
            run.stop()
            self._runs[number] = self._begun(self._walk.batches[number])
        elif product is not None:
            self._inputs.append(ref(product.x))
        return product

    def pass_by(self, matrices: tuple[Matrix, ...]) -> None:
        """Let the batches go on: these matrices have their final values."""
        self._wanted.difference_update(matrices)

    def finish(self) -> None:
        """Run to the end and keep the outputs as the states of the walk."""
        self._wanted.clear()
        self._walk.leave(self._index, map(_Run.go_on, self._runs))

    def _begun(self, batch: Batch) -> _Run:
        return _Run(partial(self._walk.run, self._index, batch), self._wanted)
