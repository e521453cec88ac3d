"""What is measured where nobody said what: a model and sizes that suit the device. Imports neither torch nor models."""

import dataclasses
from typing import Any

from lpconv.bench.cases import PLAIN, Case

__all__ = ["choose_model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choice:
    model: str
    layers: int | None
    why: str


_ON_GPU = _Choice(model="bert-large", layers=None, why="it fits any GPU, and fp8 has most to prove at its small shapes")
_ON_CPU = _Choice(model="bert-base", layers=2, why="2 of its 12 layers take a CPU a moment, and bert-large would not")
# Batch and sequence length.
_GPU_SIZE, _CPU_SIZE, _DEMO_SIZE = (8, 512), (1, 128), (4, 128)


def choose_model(model: str | None, layers: int | None, device: dict[str, Any]) -> tuple[Case, tuple[str, ...]]:
    """A case to fill in, and what to tell the user about choices that were made for them.

    `device` is what the child said of the machine: ``device`` (as torch calls it) and its ``name``.
    """
    is_cpu = device["device"] == "cpu"
    notes: tuple[str, ...] = ()
    if model is None:
        chosen = _ON_CPU if is_cpu else _ON_GPU
        layers = layers or chosen.layers
        model = chosen.model
        notes = (f"no model was named, so {model} is measured on {device['name']}: {chosen.why}",)
    batch, seq = _DEMO_SIZE if model == "demo" else _CPU_SIZE if is_cpu else _GPU_SIZE
    case = Case(
        model=model, layers=layers, format="bf16", method=PLAIN, mode="infer", optimizer=None, batch=batch, seq=seq,
        compiled="blocks", device=device["device"],
    )  # fmt: skip
    return case, notes
