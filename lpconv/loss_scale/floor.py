"""A smallest loss scale that rises by a schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lpconv.errors import UsageError

_SMALLEST = 2.0**-126  # the smallest normal fp32 number; below it a scale loses digits, then is 0 and stays there

_HINT = "write one scale, or STEP:SCALE pairs in rising order of step, such as 0:1,40000:8192"


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The smallest loss scale allowed at each step: the enhanced loss scaling of Mellempudi et al. (arXiv 1905.12334).

    `starts` are (step, scale) pairs in rising order of step; each scale holds from its step on, and before the first
    there is no floor but the smallest normal number of fp32. Raises `UsageError` for anything else.
    """

    starts: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.starts]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise UsageError(f"the steps of a loss-scale floor do not rise: {steps}", hint=_HINT)
        for _, scale in self.starts:
            if not _SMALLEST <= scale < math.inf:
                raise UsageError(f"{scale} is no floor of a loss scale", hint=_HINT)

    @classmethod
    def of(cls, value: "Floor | float | str | Mapping[int, float] | None") -> "Floor":
        """From what people write: a scale, a mapping from steps to scales, "0:1,40000:8192", or None for no floor."""
        if isinstance(value, Floor):
            return value
        if value is None:
            return cls()
        if isinstance(value, Mapping):
            return cls(starts=tuple((int(step), float(scale)) for step, scale in value.items()))
        try:
            if isinstance(value, str) and ":" in value:
                pairs = (entry.split(":") for entry in value.split(","))
                return cls(starts=tuple((int(step), float(scale)) for step, scale in pairs))
            return cls(starts=((0, float(value)),))
        except ValueError as error:
            raise UsageError(f"cannot read the loss-scale floor `{value}`", hint=_HINT) from error

    def at(self, step: int) -> float:
        """The floor of the step with this number, from 0."""
        return next((scale for start, scale in reversed(self.starts) if step >= start), _SMALLEST)
