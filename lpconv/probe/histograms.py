"""What a probe saw, as records that know no format: any question about a format is asked of them afterwards."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lpconv.formats.histogram import ExponentHistogram
from lpconv.results import SCHEMA_VERSION

__all__ = ["GRADIENT_ROLES", "ROLES", "ProbeResult", "ProbedTensor"]

# In the order of a training step. Gradients are the roles that a loss scale multiplies.
ROLES = ("weight", "input", "output", "grad_output", "grad_input", "weight_grad")
GRADIENT_ROLES = ("grad_output", "grad_input", "weight_grad")


@dataclass(frozen=True, kw_only=True)
class ProbedTensor:
    """One role of one layer over all probed steps. `histogram` is `ExponentHistogram.to_dict`."""

    layer: str
    role: str
    histogram: dict[str, Any]

    @cached_property
    def exponents(self) -> ExponentHistogram:
        """The histogram as an object."""
        return ExponentHistogram.from_dict(self.histogram)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """A probe or a tracked run. `overhead` is the time that recording took, as a share of the time without it."""

    kind: str = "probe"
    tensors: tuple[ProbedTensor, ...]
    steps_seen: int
    steps_recorded: int
    overhead: float
    losses: tuple[float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
