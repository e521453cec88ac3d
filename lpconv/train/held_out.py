"""Held-out metrics beyond those of the run itself: of its weights in fp32, and of a guess without a model.

The metrics in fp32 separate effects of training and of publishing.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lpconv.models.objective import IGNORED
from lpconv.results import Series
from lpconv.train.examples import Stream

IN_FP32, PUBLISHED = "_fp32", "_published"  # suffixes of metric names


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
    accuracy: Callable[[Any, Mapping[str, Tensor]], float],
) -> tuple[Series, ...]:  # fmt: skip
    """Mean loss, and accuracy if it is not NaN, of `model` with the trained `values`, weighted by targets.

    `accuracy` is that of a batch, from the model's output. Without `values`, `model` is the published one, and the
    metrics are named accordingly.
    """
    if values is not None:
        model.load_state_dict(values)
    model.eval()
    rows = []
    for batch in batches:
        out = model(**batch)
        rows.append((num_targets(batch), float(out.loss), accuracy(out, batch)))
    behind = PUBLISHED if values is None else IN_FP32
    return tuple(
        Series(name=name + behind, steps=(step,), values=(value,)) for name, value in held_out_metrics(rows).items()
    )


def num_targets(batch: Mapping[str, Tensor]) -> float:
    """Number of labels in a batch; a causal model predicts all but one of each window, which are equally long."""
    return float((batch["labels"] != IGNORED).sum())


def held_out_metrics(batches: Iterable[Sequence[float]]) -> dict[str, float]:
    """Means over the targets of batches (targets, loss, accuracy or NaN)."""
    sizes, losses, accuracies = zip(*batches, strict=True)
    means = {"eval_loss": fmean(losses, sizes), "eval_accuracy": fmean(accuracies, sizes)}
    return means if not math.isnan(means["eval_accuracy"]) else {"eval_loss": means["eval_loss"]}


def baselines(train: Iterable[Any], held_out: Stream, *, num_targets: int) -> dict[str, float]:
    """Loss per target, and accuracy for classes, of a guess from the frequencies of the training targets `train`.

    For classes it is the majority baseline (accuracy) and the entropy of the frequencies (loss), for tokens the unigram
    model. `num_targets` is the number of classes or tokens.
    """
    trained = _concatenate(train)
    counts = np.bincount(trained[trained != IGNORED], minlength=num_targets)
    labels = [held_out[i]["labels"] for i in range(len(held_out))]
    targets = _concatenate(x[1:] if held_out.first_target else x for x in labels)
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
