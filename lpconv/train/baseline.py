"""What a guess without a model would get: it knows how often each class or token came in training and nothing else.

For classes that is the majority baseline (accuracy) and the entropy of their shares (loss), for tokens the unigram
model. What training never saw has the probability of what it saw once (Good and Turing), spread evenly.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpconv.train.examples import IGNORED, Stream


def baselines(train: Iterable[Any], held_out: Stream, *, num_targets: int) -> dict[str, float]:
    """The loss per target of the guess, and its accuracy where a target is a class; `train` are targets of examples.

    `num_targets` is the number of classes or tokens there are.
    """
    counts = np.bincount(_joined(train), minlength=num_targets)
    labels = [held_out[i]["labels"] for i in range(len(held_out))]
    # A causal model predicts the next token, so nothing predicts the first.
    targets = _joined(x[1:] if held_out.causal else x for x in labels)
    targets = targets[targets != IGNORED]
    found = {"eval_loss": float(-np.log(_shares(counts))[targets].mean())}
    is_class = isinstance(labels[0], int)
    return found | ({"eval_accuracy": float((targets == counts.argmax()).mean())} if is_class else {})


def _joined(parts: Iterable[Any]) -> NDArray[np.int64]:
    return np.concatenate([np.atleast_1d(np.asarray(x, dtype=np.int64)) for x in parts])


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The probability of each target; none is zero."""
    total = counts.sum()
    unseen = max(int((counts == 1).sum()), 1) / (total + 1)
    shares: NDArray[np.float64] = (1 - unseen) * counts / total + unseen / len(counts)
    return shares
