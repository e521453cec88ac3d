"""What a checkpoint is trained to do, and the class of transformers that does it."""

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
    """A task by name and in words, the classes of transformers that do it, and what its loss is called."""

    name: str
    words: str
    loss: str
    auto: Any
    mapping: Mapping[str, Any]


SEQ2SEQ = Task(
    name="seq2seq",
    words="encoder with a decoder",
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
    loss="mean square distance of the output to fixed normal targets",
    auto=transformers.AutoModel,
    mapping={},
)
# Classes that say which texts and images belong together.
TEXT_AND_IMAGE = frozenset(modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.values())
TASKS = {t.name: t for t in (SEQ2SEQ, CLASSIFICATION, MLM, CLM)}


def task_of(class_name: str) -> Task:
    """The task of a model class; `NONE` for bare models and for what lpconv trains nothing for."""
    return next((t for t in TASKS.values() if class_name in t.mapping.values()), NONE)


def find_task(config: Mapping[str, Any], name: str, *, has_labels: bool) -> Task:
    """The task called `name`; "auto" asks the checkpoint's config, and for a bare encoder whether there are labels.

    Raises UsageError where that does not decide.
    """
    if name != "auto":
        return TASKS[name]
    named = (config.get("architectures") or [""])[0]
    found = task_of(named)
    if found is not NONE and not (has_labels and found in (MLM, CLM)):
        return found
    if has_labels:
        return CLASSIFICATION
    if "auto_map" in config:
        architecture(config)
    raise UsageError(
        f"`{named or 'config.json'}` does not say what it is trained for",
        hint="pass --task mlm, clm, classification or seq2seq",
    )


def architecture(config: Mapping[str, Any], *, trusted: Path | None = None) -> Any:
    """The transformers class that config.json's `architectures` names; AutoModel where it names none.

    With `trusted`, the directory of the checkpoint, its own Python code may run, and a class may be from there.
    """
    names = config.get("architectures") or []
    if not names:
        return transformers.AutoModel
    found = getattr(transformers, names[0], None)
    own = config.get("auto_map")
    if found is None and isinstance(own, Mapping):
        if trusted is not None:
            return _own_class(own, names[0], trusted)
        raise UnsupportedError(
            f"`{names[0]}` is Python code of the checkpoint's own",
            hint="`convert` and `verify` run it with --trust-remote-code; other commands do not",
        )
    if found is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no class `{names[0]}`",
            hint="install the release of transformers that config.json names, or a newer one",
        )
    return found


def _own_class(own: Mapping[str, Any], name: str, directory: Path) -> Any:
    """A class of a checkpoint's own code, which this runs."""
    for reference in (r for found in own.values() for r in (found if isinstance(found, list) else [found])):
        if isinstance(reference, str) and reference.rpartition(".")[2] == name:
            return get_class_from_dynamic_module(reference, directory)
    raise UnsupportedError(f"auto_map of config.json does not say where `{name}` is", hint="add it there")


def main_input(config: Mapping[str, Any]) -> str:
    """What the class of config.json's `architectures` reads, by argument; token ids where transformers has none."""
    name = (config.get("architectures") or [""])[0]
    if name in TEXT_AND_IMAGE:
        return "input_ids, pixel_values"
    return str(getattr(getattr(transformers, name, None), "main_input_name", "input_ids"))


def concrete(cls: Any, config: Any) -> Any:
    """The class that an Auto class makes of a config: Auto classes open directories, and only those.

    Raises UnsupportedError where it makes none.
    """
    if not hasattr(cls, "_model_mapping"):
        return cls
    try:
        return _get_model_class(config, cls._model_mapping)
    except KeyError:
        raise UnsupportedError(
            f"{cls.__name__} opens no model of type `{config.model_type}`", hint="choose another class or task"
        ) from None
