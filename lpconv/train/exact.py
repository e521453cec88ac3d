"""Held-out figures of trained weights in fp32: what low precision did to the training, apart from the evaluation."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lpconv.results import Series
from lpconv.train.recipes import Arithmetic

__all__ = ["IN_FP32", "computes_in_fp32", "in_fp32", "renamed"]

IN_FP32 = "_fp32"  # behind the name of a metric


def computes_in_fp32(arithmetic: Arithmetic) -> bool:
    """Whether a run's own figures are those of its weights in fp32."""
    return arithmetic.precision == "fp32" and not arithmetic.is_scaled


def renamed(evaluations: Iterable[Series]) -> tuple[Series, ...]:
    """The last figure of each metric, under its name for fp32."""
    return tuple(Series(name=s.name + IN_FP32, steps=s.steps[-1:], values=s.values[-1:]) for s in evaluations)


@torch.no_grad()
def in_fp32(
    model: Any, values: Mapping[str, Tensor], batches: Iterable[Mapping[str, Tensor]], *, step: int, accuracy: bool
) -> tuple[Series, ...]:
    """Mean loss, and accuracy if asked for, of `model` with the given state; batches weigh by their examples."""
    model.load_state_dict(values)
    model.eval()
    losses, hits, count = 0.0, 0, 0
    for batch in batches:
        out, labels = model(**batch), batch["labels"]
        losses += float(out.loss) * len(labels)
        hits += int((out.logits.argmax(-1) == labels).sum()) if accuracy else 0
        count += len(labels)
    found = {"eval_loss": losses / count} | ({"eval_accuracy": hits / count} if accuracy else {})
    return tuple(Series(name=name + IN_FP32, steps=(step,), values=(value,)) for name, value in found.items())
