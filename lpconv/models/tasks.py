"""What a model is trained to do, and the model opened for it in fp32."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from lpconv.checkpoint.contents import read_contents
from lpconv.errors import UnsupportedError, UsageError
from lpconv.models.load import load_with_missing
from lpconv.models.plugin import LpconvQuantizer
from lpconv.models.quiet import quiet_transformers

__all__ = ["Task", "find_task", "open_for"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task by name, the classes of transformers that do it, and what its loss is called."""

    name: str
    auto: Any
    mapping: Mapping[str, Any]
    loss: str


_TASKS = (
    Task(
        name="seq2seq",
        auto=transformers.AutoModelForSeq2SeqLM,
        mapping=modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        loss="cross entropy of the target tokens",
    ),
    Task(
        name="classification",
        auto=transformers.AutoModelForSequenceClassification,
        mapping=modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        loss="cross entropy of the label",
    ),
    Task(
        name="mlm",
        auto=transformers.AutoModelForMaskedLM,
        mapping=modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        loss="cross entropy of the masked tokens",
    ),
    Task(
        name="clm",
        auto=transformers.AutoModelForCausalLM,
        mapping=modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        loss="cross entropy of the next token",
    ),
)


def find_task(directory: Path, name: str, *, has_labels: bool) -> Task:
    """The task called `name`; "auto" asks the checkpoint's config, and for a bare encoder whether there are labels.

    Raises UsageError where that does not decide, and UnsupportedError where transformers has no such model.
    """
    by_name = {t.name: t for t in _TASKS}
    if name != "auto":
        return by_name[name]
    architectures = read_contents(directory).config.get("architectures") or [""]
    found = next((t for t in _TASKS if architectures[0] in t.mapping.values()), None)
    if found is not None and not (has_labels and found.name in ("mlm", "clm")):
        return found
    if has_labels:
        return by_name["classification"]
    raise UsageError(
        f"`{architectures[0] or directory.name}` does not say what it is trained for",
        hint="pass --task mlm, clm, classification or seq2seq",
    )


def open_for(task: Task, directory: Path, *, seed: int, num_labels: int | None = None) -> tuple[Any, tuple[str, ...]]:
    """The model in fp32 with the task's head, and the names of what the checkpoint does not hold.

    Those are drawn from `seed`, so that a run and its twin begin alike. Outputs of lpconv are opened as the weights
    that their codes stand for. Raises UnsupportedError for models that the task has no class for, and for those that
    another library quantised.
    """
    with quiet_transformers():
        try:
            config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
            model_class = task.auto._model_mapping[type(config)]
        except (KeyError, ValueError) as e:
            raise UnsupportedError(
                f"transformers has no {task.name} model for this checkpoint: {str(e).splitlines()[0]}",
                hint="choose another --task",
            ) from e
        torch.manual_seed(seed)
        options = {} if num_labels is None else {"num_labels": num_labels, "ignore_mismatched_sizes": True}
        model, missing = load_with_missing(directory, dtype=torch.float32, model_class=model_class, **options)
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, LpconvQuantizer):
        model.dequantize()  # the weights are decoded already: this only lets go of the codes' scales
    elif quantizer is not None:
        raise UnsupportedError(
            f"the weights of `{directory.name}` are kept as codes of {quantizer.quantization_config.quant_method}",
            hint="fine-tune the checkpoint that it was made from",
        )
    model.config.use_cache = False  # keys and values of past tokens would be kept for nothing
    return model, missing
