"""Loss change allocation while a model trains: every step of a run, on the first held-out batches."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.probe.lca import LossChange, LossChangeStep, by_layer, summarise
from lpconv.results import LayerChange, LossAllocation, from_json, to_json

PROBE_BATCHES = 2
NUM_COPIES = 14  # of the parameters in fp32, the twin and its gradients among them, while a step is measured


class LossWatch:
    """Allots the loss change of each step of `model`. `twin` is the same model in fp32, and is overwritten.

    `seconds` is the time that the last step's measurement took.
    """

    def __init__(self, model: nn.Module, twin: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self.model, self.twin, self.batches = model, twin, batches
        self.seconds = 0.0
        self._lca: LossChange | None = None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Where `optimizer.step()` would come, gradients unscaled and clipped."""
        started = time.perf_counter()
        if self._lca is None:  # the optimizer is made, or restored, once training begins
            self._lca = LossChange(self.model, optimizer, self.batches, twin=self.twin)
        self._lca.before_step()
        self.seconds = time.perf_counter() - started

    def after_step(self, step: int) -> dict[str, Any]:
        """After the step with this number: its allocation by layer, for the step's row."""
        assert self._lca is not None
        started = time.perf_counter()
        found = by_layer(self._lca.after_step())
        self._lca.steps.clear()  # rows keep them
        self.seconds += time.perf_counter() - started
        row: dict[str, Any] = to_json(dataclasses.replace(found, step=step))
        return row


def loss_allocation(rows: Iterable[Mapping[str, Any]]) -> LossAllocation | None:
    """What the rows of a run add up to; None where nothing was measured.

    A run that was resumed on another device may not find the loss it left, bit for bit; steps before that are left out.
    """
    steps = [from_json(LossChangeStep, row["lca"]) for row in rows if "lca" in row]
    if not steps:
        return None
    breaks = [i for i in range(1, len(steps)) if steps[i - 1].loss_after != steps[i].loss_before]
    stretch = steps[breaks[-1] :] if breaks else steps
    total = summarise(stretch)
    return LossAllocation(
        first_step=stretch[0].step,
        last_step=total.step,
        num_batches=PROBE_BATCHES,
        loss_before=total.loss_before,
        loss_after=total.loss_after,
        change=total.change,
        rounding=total.rounding,
        rounding_share=total.rounding_share if total.change != total.rounding else None,
        closure_error=total.closure_error,
        layers=tuple(
            LayerChange(layer=a.name, change=a.change, rounding=a.rounding, helped=a.helped if a.num_moved else None)
            for a in total.parameters
        ),
    )
