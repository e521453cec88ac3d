"""Held-out metrics beyond those of the run itself: of its weights in fp32, and of a guess without a model.

The metrics in fp32 separate effects of training and of publishing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpconv.results import Series
from lpconv.train.examples import IGNORED, Stream
from lpconv.train.recipes import Arithmetic

IN_FP32, PUBLISHED = "_fp32", "_published"  # suffixes of metric names


def computes_in_fp32(arithmetic: Arithmetic) -> bool:
    """Whether a run's own metrics are those of its weights in fp32."""
    return arithmetic.precision == "fp32" and not arithmetic.is_scaled


def rename_to_fp32(evaluations: Iterable[Series]) -> tuple[Series, ...]:
    """The last value of each metric, under its fp32 name."""
    return tuple(Series(name=s.name + IN_FP32, steps=s.steps[-1:], values=s.values[-1:]) for s in evaluations)


def as_published(evaluations: Iterable[Series]) -> tuple[Series, ...]:
    """The fp32 metrics under their names for the published model. A twin is published as trained."""
    exact = (s for s in evaluations if s.name.endswith(IN_FP32))
    return tuple(replace(s, name=s.name.removesuffix(IN_FP32) + PUBLISHED) for s in exact)


@torch.no_grad()
def in_fp32(
    model: Any, values: Mapping[str, Tensor] | None, batches: Iterable[Mapping[str, Tensor]], *, step: int,
    num_right: Callable[[Any, Mapping[str, Tensor]], float] | None,
) -> tuple[Series, ...]:  # fmt: skip
    """Mean loss, and optionally accuracy, of `model` with the trained `values`, weighted by examples.

    `num_right` counts the right examples of a batch from the model's output, for the accuracy. Without `values`,
    `model` is the published one, and the metrics are named accordingly.
    """
    if values is not None:
        model.load_state_dict(values)
    model.eval()
    losses: list[float] = []  # per example, its batch's loss: bit-identical to Trainer's mean
    hits = 0.0
    for batch in batches:
        out, labels = model(**batch), batch["labels"]
        losses += [float(out.loss)] * len(labels)
        hits += num_right(out, batch) if num_right is not None else 0
    metrics = {"eval_loss": float(np.array(losses, np.float32).mean())}
    metrics |= {"eval_accuracy": hits / len(losses)} if num_right is not None else {}
    behind = PUBLISHED if values is None else IN_FP32
    return tuple(Series(name=name + behind, steps=(step,), values=(value,)) for name, value in metrics.items())


def baselines(train: Iterable[Any], held_out: Stream, *, num_targets: int) -> dict[str, float]:
    """Loss per target, and accuracy for classes, of a guess from the frequencies of the training targets `train`.

    For classes it is the majority baseline (accuracy) and the entropy of the frequencies (loss), for tokens the unigram
    model. `num_targets` is the number of classes or tokens.
    """
    counts = np.bincount(_concatenate(train), minlength=num_targets)
    labels = [held_out[i]["labels"] for i in range(len(held_out))]
    # A causal model predicts the next token, so the first token is not a target.
    targets = _concatenate(x[1:] if held_out.causal else x for x in labels)
    targets = targets[targets != IGNORED]
    metrics = {"eval_loss": float(-np.log(_probabilities(counts))[targets].mean())}
    is_class = isinstance(labels[0], int)
    return metrics | ({"eval_accuracy": float((targets == counts.argmax()).mean())} if is_class else {})


def _concatenate(parts: Iterable[Any]) -> NDArray[np.int64]:
    return np.concatenate([np.atleast_1d(np.asarray(x, dtype=np.int64)) for x in parts])


def _probabilities(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The probability of each target; targets unseen in training evenly share that of those seen once (Good-Turing)."""
    total = counts.sum()
    unseen = max(int((counts == 1).sum()), 1) / (total + 1)
    shares: NDArray[np.float64] = (1 - unseen) * counts / total + unseen / len(counts)
    return shares
