"""Baseline of a guess without a model, from the frequencies of classes or tokens in the training data.

For classes it is the majority baseline (accuracy) and the entropy of the frequencies (loss), for tokens the unigram
model. Targets unseen in training share the probability of those seen once (Good-Turing), evenly.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpconv.train.examples import IGNORED, Stream


def baselines(train: Iterable[Any], held_out: Stream, *, num_targets: int) -> dict[str, float]:
    """The guess's loss per target, and its accuracy for classes; `train` are the targets of training examples.

    `num_targets` is the number of classes or tokens.
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
    """The probability of each target; none is zero."""
    total = counts.sum()
    unseen = max(int((counts == 1).sum()), 1) / (total + 1)
    shares: NDArray[np.float64] = (1 - unseen) * counts / total + unseen / len(counts)
    return shares
