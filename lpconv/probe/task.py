"""What a checkpoint is trained to do, as far as a probe needs it: the model in fp32, and a loss for its outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from lpconv.errors import UnsupportedError
from lpconv.models.load import architecture, load_with_missing
from lpconv.models.quiet import quiet_transformers
from lpconv.probe.run import model_loss

__all__ = ["CAUSAL", "HIDDEN", "MASKED", "OpenedModel", "open_model", "target_loss"]

CAUSAL, MASKED, HIDDEN = "causal language model", "masked language model", "no language-model head"

_LOSS_WORDS = {
    CAUSAL: "cross entropy of the next token",
    MASKED: "cross entropy of the masked tokens",
    HIDDEN: "mean square distance of the output to fixed normal targets",
}
_OWN_LOOP = "track a training step of your own: `with lpconv.track(model, every=1) as t:`, then `print(t.table())`"


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model in fp32 and evaluation mode, its task, and how its outputs become one scalar.

    `missing` names the parameters that the checkpoint does not hold; they are random.
    """

    model: Any
    task: str
    loss: Callable[[Any], Tensor]
    missing: tuple[str, ...]

    @property
    def loss_words(self) -> str:
        """The loss, for the report."""
        return _LOSS_WORDS[self.task]


def open_model(directory: Path) -> OpenedModel:
    """The model in a checkpoint directory, outputs of lpconv included.

    A head that the checkpoint does not hold would send random gradients through the whole model, so the bare model is
    opened instead. Raises UnsupportedError for models that do not read token ids alone.
    """
    with quiet_transformers():
        _check_reads_text(directory)
        model, missing = load_with_missing(directory, dtype=torch.float32)
        task = _task(model)
        if task != HIDDEN and missing:
            task = HIDDEN
            model, missing = load_with_missing(directory, dtype=torch.float32, model_class=transformers.AutoModel)
    model.config.use_cache = False  # keys and values of past tokens would be kept for nothing
    loss = model_loss if task != HIDDEN else target_loss(seed=0)
    return OpenedModel(model=model, task=task, loss=loss, missing=missing)


def _check_reads_text(directory: Path) -> None:
    """Before any weight is read."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except ValueError as e:  # a model type of another release, or one that only the checkpoint's own code knows
        raise UnsupportedError(
            f"transformers does not open this model: {str(e).splitlines()[0]}", hint=_OWN_LOOP
        ) from e
    cls = architecture({"architectures": config.architectures})
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"`{cls.__name__}` is an encoder with a decoder, which a probe does not run", hint=_OWN_LOOP
        )
    reads = getattr(cls, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise UnsupportedError(f"`{cls.__name__}` reads `{reads}`, not token ids", hint=_OWN_LOOP)


def _task(model: Any) -> str:
    name = type(model).__name__
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return CAUSAL
    return MASKED if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() else HIDDEN


def target_loss(*, seed: int) -> Callable[[Any], Tensor]:
    """A loss for models without a language-model head: mean square distance of the first output to N(0, 1) targets.

    The mean square of the output itself will not do: a final normalisation keeps it constant, so that its gradient is
    nothing but rounding. The targets are the same in every step.
    """

    def loss(output: Any) -> Tensor:
        found: Tensor = output[0]
        targets = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed))
        return (found - targets).square().mean()

    return loss
