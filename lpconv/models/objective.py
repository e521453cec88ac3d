"""The test that a model class computes the training objective of its task from its labels.

Most causal classes of transformers shift labels to the next token themselves; those of Bart, XLM and others do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lpconv.errors import UnsupportedError
from lpconv.models.opening import FIT_HINT, model_errors
from lpconv.models.tasks import CLM, NONE, SEQ2SEQ, Task
from lpconv.progress import quiet_transformers

IGNORED = -100  # label that losses ignore
_ROUNDING = 1e-5  # relative; that of fp32 is below 1e-6


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Whether the labels of a causal class must be the next tokens already, and notes for the user."""

    shifted: bool = False
    notes: tuple[str, ...] = ()


def next_tokens(ids: Tensor) -> Tensor:
    """The token after each one along the last axis; the last one has none and is ignored."""
    return torch.cat([ids[..., 1:], torch.full_like(ids[..., :1], IGNORED)], -1)


@torch.no_grad()
def find_objective(model: Any, task: Task, batch: Mapping[str, Tensor]) -> Objective:
    """How the class of `model` takes labels, from its loss on two rows of a batch, in which task clm has the input ids.

    Raises UnsupportedError if the model does not run, if its loss is not the cross entropy of its logits, and if its
    decoder does not read the targets. A model without finite logits has no objective to find.
    """
    few, name = {what: x[:2] for what, x in batch.items()}, type(model).__name__
    with quiet_transformers(), model_errors("the model fails when it runs", hint=FIT_HINT):
        if task is SEQ2SEQ:
            length = min(few["input_ids"].shape[1], few["labels"].shape[1])  # for FSMT, whose decoder reads the source
            if _changes(model, {what: x[:, :length].contiguous() for what, x in few.items()}, "labels") != (
                False,
                True,
            ):
                raise UnsupportedError(
                    f"the decoder of `{name}` does not predict each target token from those before it",
                    hint="transformers does not make its input from the labels; choose a model of another class",
                )
        output = model(**few)
        if task is NONE or not bool(output.logits.isfinite().all()):
            return Objective()
        sees_ahead = task is CLM and _changes(model, few, "input_ids")[0]
    shifted = task is CLM and not _is_cross_entropy(output, next_tokens(few["labels"]))
    if (shifted or task is not CLM) and not _is_cross_entropy(output, few["labels"]):
        raise UnsupportedError(
            f"the loss of `{name}` ({float(output.loss):.6g} on the first batch) is not the {task.loss}",
            hint="choose another --task; if config.json asks for more, such as output_router_logits, turn it off there",
        )
    notes = [f"`{name}` does not shift labels, so it is given the next tokens as labels"] * shifted
    notes += [f"`{name}` sees the tokens that it has to predict, so its loss says little"] * sees_ahead
    return Objective(shifted=shifted, notes=tuple(notes))


def _is_cross_entropy(output: Any, labels: Tensor) -> bool:
    if output.logits.shape[:-1] != labels.shape:
        return False
    expected = float(F.cross_entropy(output.logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED))
    return abs(float(output.loss) - expected) <= _ROUNDING * max(expected, 0.1)


def _changes(model: Any, batch: Mapping[str, Tensor], what: str) -> tuple[bool, bool]:
    """Whether another id in the middle of a row changes predictions that must not see it, and those that must."""
    lengths, logits_BLV = (batch["labels"] != IGNORED).sum(-1), model(**batch).logits
    row, place = int(lengths.argmax()), int(lengths.max()) // 2 - 1
    if place < 0 or not bool(logits_BLV.any()):  # too short, or a zero head
        return False, True
    other_BL = batch[what].clone()
    other_BL[row, place] = (other_BL[row, place] + 1) % logits_BLV.shape[-1]
    change_L = (model(**{**batch, what: other_BL}).logits - logits_BLV)[row].abs().amax(-1) / logits_BLV.abs().max()
    before = place + (what == "labels")  # the token at `place` predicts the next one, its label is for itself
    return bool((change_L[:before] > _ROUNDING).any()), bool((change_L[place + 1 :] > 0).any())
