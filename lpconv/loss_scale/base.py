"""What every loss scale is: a number for the next step, a rule that changes it, a history and a state."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from lpconv.errors import InputError

_HISTORY_LENGTH = 10_000  # changes kept; a rule that changes at every step would otherwise grow with the run


class LossScale(ABC):
    """The factor on the loss of the next step, chosen from what the last steps saw.

        (loss * loss_scale.scale).backward()
        found_nonfinite = unscale_(parameters, loss_scale.scale)
        if not found_nonfinite:
            optimizer.step()
        loss_scale.update(found_nonfinite)

    `history` holds (number of updates made, scale from there on) of the start and of the latest 10,000 changes.
    """

    name: ClassVar[str]
    remembers: ClassVar[tuple[str, ...]] = ()  # attributes that the rule changes, besides the scale

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.num_updates = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self.history: deque[tuple[int, float]] = deque([(0, scale)], maxlen=_HISTORY_LENGTH)

    def update(self, found_nonfinite: bool, *, max_gradient: float | None = None) -> None:
        """Choose the next scale; call once per step, taken or skipped.

        `found_nonfinite`: the gradients of this step held Inf or NaN, so the optimizer's step was left out.
        `max_gradient`: the largest magnitude of the unscaled gradients; only "logmax" needs it, in finite steps.
        """
        self.num_updates += 1
        self.num_skipped += found_nonfinite
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if found_nonfinite else 0
        scale = self._next(found_nonfinite, max_gradient)
        if scale != self.scale:
            self.history.append((self.num_updates, scale))
        self.scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as JSON-able values; options are not in it."""
        return {
            "name": self.name,
            "scale": self.scale,
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "history": [list(change) for change in self.history],
            "rule": {attribute: getattr(self, attribute) for attribute in self.remembers},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises `InputError`, changing nothing, for the state of another rule."""
        expected = self.state_dict()
        if state.get("name") != self.name or state.keys() != expected.keys():
            raise InputError(
                f"this is not the state of the loss scale `{self.name}` but of `{state.get('name', 'something else')}`",
                hint="resume with the loss scale that the run began with",
            )
        if state["rule"].keys() != expected["rule"].keys():
            raise InputError(f"the state of the loss scale `{self.name}` is damaged", hint="resume from another one")
        self.scale = float(state["scale"])
        self.num_updates, self.num_skipped = state["num_updates"], state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
        self.history = deque(((n, s) for n, s in state["history"]), maxlen=_HISTORY_LENGTH)
        for attribute in self.remembers:
            setattr(self, attribute, state["rule"][attribute])

    @abstractmethod
    def _next(self, found_nonfinite: bool, max_gradient: float | None) -> float:
        """The scale of the next step; `num_updates` already counts this one."""
