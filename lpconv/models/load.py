"""The model in a checkpoint directory, an output of any method included."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lpconv.checkpoint.compressed import quantized_by
from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.residual import RESIDUAL_INDEX
from lpconv.forms.foreign import READ
from lpconv.forms.reader import StoredTensors
from lpconv.models.plugin import register
from lpconv.models.tasks import architecture, concrete

__all__ = ["from_state", "load", "load_with_missing"]


def load(path: str | Path, *, dtype: torch.dtype | None = None, model_class: Any = None, **kwargs: Any) -> Any:
    """The model in a checkpoint directory, in evaluation mode, of `model_class` or the class that its config names.

    Scaled checkpoints (unit, Scalify) are decoded into `dtype`, by default the source's. A Collage checkpoint is opened
    with its residual added back, in fp32 by default; with another `dtype` it is the sum rounded to it. The layouts of
    others that lpconv reads are decoded too, without their packages. Further arguments go to `from_pretrained`. Raises
    InputError where the residual does not belong to the weights.
    """
    return load_with_missing(path, dtype=dtype, model_class=model_class, **kwargs)[0]


def load_with_missing(
    path: str | Path, *, dtype: torch.dtype | None = None, model_class: Any = None, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """`load`, and the names of the parameters that the checkpoint does not hold: they are freshly initialised."""
    register()
    contents = read_contents(Path(path))
    cls = model_class or architecture(contents.config)
    has_residual = (contents.directory / RESIDUAL_INDEX).exists()
    kwargs["output_loading_info"] = True
    if not has_residual and quantized_by(contents.config) not in READ:
        model, info = cls.from_pretrained(contents.directory, dtype=dtype or "auto", **kwargs)
        return model.eval(), tuple(sorted(info["missing_keys"]))
    config = copy.deepcopy(kwargs.pop("config", None))
    if config is None:  # as from a directory, what the config knows goes to it
        found = transformers.AutoConfig.from_pretrained(contents.directory, return_unused_kwargs=True, **kwargs)
        config, kwargs = found
    with StoredTensors.open(contents.directory) as stored:
        state = {name: stored.tensor(name) for name in stored.forms}
    default = torch.float32 if has_residual else config.dtype
    model, missing = from_state(concrete(cls, config), config, state, dtype=dtype or default, **kwargs)
    if model.can_generate() and (contents.directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(contents.directory)
    return model, missing


def from_state(
    model_class: Any, config: Any, state: dict[str, Tensor], *, dtype: torch.dtype, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """The model of a class and config with decoded tensors, by their names in a checkpoint; and what is missing.

    transformers renames and merges them as it does those of files. `config` loses what it says of codes.
    """
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    kwargs["output_loading_info"] = True
    model, info = model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **kwargs)
    return model.eval(), tuple(sorted(info["missing_keys"]))
