"""What held-out figures rest on: how many examples, their standard error, and what a guess without a model would get.

The guess knows how often each class or token came in training and nothing else. For classes it is the majority baseline
(accuracy) and the entropy of their shares (loss), for tokens the unigram model. What training never saw has the
probability of what it saw once (Good and Turing), spread evenly.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpconv.results import EvaluationRecord, HeldOutRecord, RunRecord
from lpconv.train.examples import IGNORED, Stream

__all__ = ["baselines", "batch_error", "gap_error", "held_out_records"]

Figures = tuple[float, ...]
_FIGURES: dict[str, Callable[[EvaluationRecord], Figures]] = {
    "eval_loss": lambda e: e.losses,
    "eval_accuracy": lambda e: e.accuracies,
}


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


def batch_error(values: Sequence[float], sizes: Sequence[int]) -> float | None:
    """The standard error of a mean over examples, from the means over batches of so many; None with one batch.

    That of a weighted mean of clusters (Cochran, Sampling Techniques, section 9A.1, without the correction for a finite
    population).
    """
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return None
    mean = _mean(values, sizes)
    squares = math.fsum((size / sum(sizes) * (v - mean)) ** 2 for v, size in zip(values, sizes, strict=True))
    return math.sqrt(count / (count - 1) * squares)


def held_out_records(
    runs: Sequence[RunRecord], baseline: dict[str, float], *, num_available: int
) -> tuple[HeldOutRecord, ...]:
    """A record for each role and metric, over the seeds of that role, which saw the same held-out batches."""
    found = []
    for role in dict.fromkeys(r.role for r in runs):
        evaluated = [r.held_out for r in runs if r.role == role]
        if not all(len(e) == 2 for e in evaluated):
            continue
        sizes = evaluated[0][1].sizes
        for metric, figures in _FIGURES.items():
            before, after = (_over_seeds([figures(e[i]) for e in evaluated]) for i in (0, 1))
            if after:
                changes = [b - a for a, b in zip(before, after, strict=True)]
                found.append(
                    HeldOutRecord(
                        role=role,
                        metric=metric,
                        num_examples=sum(sizes),
                        num_available=num_available,
                        baseline=baseline.get(metric),
                        before=_mean(before, sizes),
                        after=_mean(after, sizes),
                        standard_error=batch_error(after, sizes),
                        change_error=batch_error(changes, sizes),
                    )
                )
    return tuple(found)


def gap_error(pairs: Sequence[tuple[RunRecord, RunRecord]], metric: str) -> float | None:
    """The standard error of the mean gap of (run, twin), from the held-out batches that both saw; None without them."""
    if not all(run.held_out and twin.held_out for run, twin in pairs):
        return None
    figures = _FIGURES[metric]
    ends = [(run.held_out[-1], twin.held_out[-1]) for run, twin in pairs]
    gaps = [tuple(a - b for a, b in zip(figures(run), figures(twin), strict=True)) for run, twin in ends]
    return batch_error(_over_seeds(gaps), ends[0][0].sizes)


def _over_seeds(figures: Sequence[Figures]) -> list[float]:
    """Of each batch, the mean over seeds."""
    return [statistics.fmean(values) for values in zip(*figures, strict=True)]


def _mean(values: Sequence[float], sizes: Sequence[int]) -> float:
    return statistics.fmean(values, weights=sizes)
