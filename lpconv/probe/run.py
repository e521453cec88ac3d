"""A probe run: forward and backward over a few batches, no optimizer, everything recorded."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.errors import UsageError
from lpconv.probe.histograms import ProbeResult
from lpconv.probe.track import track

__all__ = ["model_loss", "probe", "target_loss"]


def model_loss(output: Any) -> Tensor:
    """The loss that a transformers model computed itself; UsageError where it had no labels to compute one from."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError("the model returned no loss", hint="put `labels` into the batches")
    return loss


def target_loss(output: Any, *, seed: int) -> Tensor:
    """A loss for models without a language-model head: mean square distance of the first output to N(0, 1) targets.

    The mean square of the output itself will not do: a final normalisation keeps it constant, so that its gradient is
    nothing but rounding. The targets are the same in every step.
    """
    found: Tensor = output[0]
    targets = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed))
    return (found - targets).square().mean()


def probe(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    steps: int | None = None,
    every: int = 1,
    loss: Callable[[Any], Tensor] = model_loss,
) -> ProbeResult:
    """Run `steps` batches (all of them for None) forward and backward, and record every `every`-th.

    Each batch holds the model's keyword arguments; `loss` makes a scalar of what the model returns, by default its own
    loss, for which the batches need labels. Weights do not move; gradients are freed after each batch, and the model
    keeps its training or evaluation mode. Raises UsageError without a batch or a loss.
    """
    losses = []
    with track(model, every=every, fixed_weights=True) as tracker:
        for batch in itertools.islice(batches, steps):
            value = loss(model(**batch))
            value.backward()  # type: ignore[no-untyped-call]
            losses.append(float(value.detach()))
            model.zero_grad(set_to_none=True)
    if not losses:
        raise UsageError("there was no batch to probe with", hint="pass at least one")
    return dataclasses.replace(tracker.result(), losses=tuple(losses))
