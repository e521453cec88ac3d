"""Tasks of checkpoints, and the transformers classes for them."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _get_model_class

from lpconv.errors import UnsupportedError, UsageError


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: its name, description, loss, and transformers classes."""

    name: str
    words: str
    loss: str
    auto: Any
    mapping: Mapping[str, Any]


SEQ2SEQ = Task(
    name="seq2seq",
    words="encoder-decoder model",
    loss="cross entropy of the target tokens",
    auto=transformers.AutoModelForSeq2SeqLM,
    mapping=modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
CLASSIFICATION = Task(
    name="classification",
    words="classifier",
    loss="cross entropy of the label",
    auto=transformers.AutoModelForSequenceClassification,
    mapping=modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
MLM = Task(
    name="mlm",
    words="masked language model",
    loss="cross entropy of the masked tokens",
    auto=transformers.AutoModelForMaskedLM,
    mapping=modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
CLM = Task(
    name="clm",
    words="causal language model",
    loss="cross entropy of the next token",
    auto=transformers.AutoModelForCausalLM,
    mapping=modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
NONE = Task(
    name="none",
    words="no language-model head",
    loss="mean squared error of the output against fixed random targets",
    auto=transformers.AutoModel,
    mapping={},
)
# Classes that match texts with images.
TEXT_AND_IMAGE = frozenset(modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.values())
TASKS = {t.name: t for t in (SEQ2SEQ, CLASSIFICATION, MLM, CLM)}


def task_of(class_name: str) -> Task:
    """The task of a model class; `NONE` for bare models and tasks that lpconv does not train."""
    return next((t for t in TASKS.values() if class_name in t.mapping.values()), NONE)


def find_task(config: Mapping[str, Any], name: str, *, has_labels: bool) -> Task:
    """The task called `name`; "auto" derives it from the config, and for a bare encoder from the presence of labels.

    Raises UsageError if that does not decide.
    """
    if name != "auto":
        return TASKS[name]
    class_name = (config.get("architectures") or [""])[0]
    task = task_of(class_name)
    if task is not NONE and not (has_labels and task in (MLM, CLM)):
        return task
    if has_labels:
        return CLASSIFICATION
    if "auto_map" in config:
        architecture(config)
    raise UsageError(
        f"`{class_name or 'config.json'}` does not say which task the model is trained for",
        hint="pass --task mlm, clm, classification or seq2seq",
    )


def architecture(config: Mapping[str, Any], *, trusted: Path | None = None) -> Any:
    """The transformers class that config.json's `architectures` names, or AutoModel if it names none.

    With `trusted`, the directory of the checkpoint, the class may come from the checkpoint's own Python code, which
    then runs.
    """
    names = config.get("architectures") or []
    if not names:
        return transformers.AutoModel
    model_class = getattr(transformers, names[0], None)
    auto_map = config.get("auto_map")
    if model_class is None and isinstance(auto_map, Mapping):
        if trusted is not None:
            return _own_class(auto_map, names[0], trusted)
        raise UnsupportedError(
            f"`{names[0]}` is Python code that comes with the checkpoint",
            hint="only `convert` and `verify` can run it, with --trust-remote-code",
        )
    if model_class is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no class `{names[0]}`",
            hint="install the version of transformers that config.json names, or a newer one",
        )
    return model_class


def _own_class(own: Mapping[str, Any], name: str, directory: Path) -> Any:
    for references in own.values():
        for reference in references if isinstance(references, list) else [references]:
            if isinstance(reference, str) and reference.rpartition(".")[2] == name:
                return get_class_from_dynamic_module(reference, directory)
    raise UnsupportedError(f"auto_map of config.json does not say where `{name}` is", hint="add it there")


def main_input(config: Mapping[str, Any]) -> str:
    """The main input argument of the class in config.json's `architectures`; "input_ids" if transformers names none."""
    name = (config.get("architectures") or [""])[0]
    if name in TEXT_AND_IMAGE:
        return "input_ids, pixel_values"
    return str(getattr(getattr(transformers, name, None), "main_input_name", "input_ids"))


def resolve_auto_class(cls: Any, config: Any) -> Any:
    """Resolve an Auto class to the class for a config, since Auto classes open directories only."""
    if not hasattr(cls, "_model_mapping"):
        return cls
    try:
        return _get_model_class(config, cls._model_mapping)
    except KeyError:
        raise UnsupportedError(
            f"{cls.__name__} cannot open a model of type `{config.model_type}`", hint="choose another class or task"
        ) from None


def cache_argument(model_class: Any) -> str | None:
    """Name of the argument that takes a cache of keys and values; None if the model takes none.

    It is `cache` since transformers 5.24, and was `past_key_values`.
    """
    parameters = inspect.signature(model_class.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)
