"""A probe run: forward and backward over a few batches, no optimizer, everything recorded."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.probe.records import ProbeResult
from lpconv.probe.track import track

__all__ = ["probe"]


def probe(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, steps: int | None = None) -> ProbeResult:
    """Record `steps` batches (all of them for None) of a transformers model that returns a loss.

    Each batch holds the model's keyword arguments, labels among them. Weights do not move; gradients are freed after
    each batch, and the model keeps its training or evaluation mode. Raises UsageError without a batch or a loss.
    """
    losses = []
    with track(model, every=1) as tracker:
        for batch in itertools.islice(batches, steps):
            loss = getattr(model(**batch), "loss", None)
            if loss is None:
                raise UsageError("the model returned no loss", hint="put `labels` into the batches")
            loss.backward()
            losses.append(float(loss.detach()))
            model.zero_grad(set_to_none=True)
    if not losses:
        raise UsageError("there was no batch to probe with", hint="pass at least one")
    return dataclasses.replace(tracker.result(), losses=tuple(losses))
