"""Run the repeated layers of a model one at a time, on windows of token ids whose hidden states are stored in between.

A model runs its layers in its own loop, with masks and positions that differ by architecture. So the model runs once
with layers that only record their arguments and return their input: this takes no longer than the embeddings, and no
architecture is named. After that every layer can run alone, any number of times.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError
from lpconv.forms.reader import StoredTensors
from lpconv.layers import blocks_of
from lpconv.models.load import load_from_files
from lpconv.models.tasks import architecture
from lpconv.storage.checkpoint import Checkpoint

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
        model, missing = load_from_files(checkpoint, stored, model_class=cls_of_model, experts_implementation="eager")
        if missing:
            raise UnsupportedError(f"the source lacks the weight `{missing[0]}`", hint=_HINT)
        model.config.use_cache = False
        return cls(model, windows_NL, at_once=at_once)

    def run(self, index: int, batch: Batch) -> Tensor:
        """The output of the next layer, `index`, for a batch."""
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
