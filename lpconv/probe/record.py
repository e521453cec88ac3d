"""The record of a probe. It is independent of number formats, so any format can be assessed later.

It is stored as `probe.json` in the folder that `lpconv probe` writes, next to an HTML report.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lpconv.formats.histogram import ExponentHistogram
from lpconv.results import SCHEMA_VERSION, RecipeNoise
from lpconv.results.documents import TensorRole
from lpconv.storage.contents import read_result

# In the order of a training step. A loss scale multiplies the gradient roles.
ROLES = ("weight", "input", "output", "grad_output", "grad_input", "weight_grad")
GRADIENT_ROLES = ("grad_output", "grad_input", "weight_grad")


@dataclass(frozen=True, kw_only=True)
class ProbedTensor:
    """Statistics of one tensor role of one layer over all recorded steps.

    `histogram` is `ExponentHistogram.to_dict`.
    """

    layer: str
    role: TensorRole
    histogram: dict[str, Any]

    @cached_property
    def exponents(self) -> ExponentHistogram:
        return ExponentHistogram.from_dict(self.histogram)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The record of a probe or of a tracked run.

    `overhead` is the time spent recording divided by the time spent on everything else. `noise` is that of gradients,
    if it was measured.
    """

    kind: str = "probe"
    tensors: tuple[ProbedTensor, ...]
    steps_seen: int
    steps_recorded: int
    overhead: float
    losses: tuple[float, ...] = ()
    noise: tuple[RecipeNoise, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def read_probe(path: Path) -> ProbeResult:
    """Read a probe's record from a file. Raises InputError if it is missing or damaged."""
    return read_result(ProbeResult, path, hint="pass the directory that `lpconv probe` wrote")
