"""The model in a checkpoint directory, an output of any method included."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lpconv.checkpoint.compressed import is_ours
from lpconv.checkpoint.contents import Contents, read_contents
from lpconv.checkpoint.residual import Residuals, read_residual
from lpconv.checkpoint.source import SafetensorsSource, read_tensor
from lpconv.mcf.split import RESIDUALS
from lpconv.models.plugin import SCALE_SUFFIX, register
from lpconv.models.tasks import architecture, concrete

__all__ = ["load", "load_with_missing", "merged_state"]


def load(path: str | Path, *, dtype: torch.dtype | None = None, model_class: Any = None, **kwargs: Any) -> Any:
    """The model in a checkpoint directory, in evaluation mode, of `model_class` or the class that its config names.

    Scaled checkpoints (unit, Scalify) are decoded into `dtype`, by default the source's. A Collage checkpoint is opened
    with its residual added back, in fp32 by default; with another `dtype` it is the sum rounded to it. The layout of
    compressed-tensors is decoded too, without that package. Further
    arguments go to `from_pretrained`. Raises InputError where the residual does not belong to the weights.
    """
    return load_with_missing(path, dtype=dtype, model_class=model_class, **kwargs)[0]


def load_with_missing(
    path: str | Path, *, dtype: torch.dtype | None = None, model_class: Any = None, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """`load`, and the names of the parameters that the checkpoint does not hold: they are freshly initialised."""
    register()
    contents = read_contents(Path(path))
    cls = model_class or architecture(contents.config)
    residuals = read_residual(contents.directory)
    compressed = is_ours(contents)
    kwargs["output_loading_info"] = True
    if residuals is None and not compressed:
        model, info = cls.from_pretrained(contents.directory, dtype=dtype or "auto", **kwargs)
        return model.eval(), tuple(sorted(info["missing_keys"]))
    config = copy.deepcopy(kwargs.pop("config", None))
    if config is None:  # as from a directory, what the config knows goes to it
        found = transformers.AutoConfig.from_pretrained(contents.directory, return_unused_kwargs=True, **kwargs)
        config, kwargs = found
    if residuals is not None:
        state, default = merged_state(contents, residuals), torch.float32
    else:
        state, default = _decoded_state(contents), config.dtype
        del config.quantization_config
    cls = concrete(cls, config)
    model, info = cls.from_pretrained(None, config=config, state_dict=state, dtype=dtype or default, **kwargs)
    if model.can_generate() and (contents.directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(contents.directory)
    return model.eval(), tuple(sorted(info["missing_keys"]))


def merged_state(contents: Contents, residuals: Residuals) -> dict[str, Tensor]:
    """Every tensor of a Collage checkpoint under its stored name; those with a residual in fp32, with it added."""
    form = RESIDUALS[residuals.form]
    with SafetensorsSource(contents) as source:
        state = {name: read_tensor(source, name) for name in source.entries}
    for name, low in residuals.tensors():
        state[name] = form.merge(state[name], low)
    return state


def _decoded_state(contents: Contents) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in compressed-tensors' layout; codes decoded to fp32. It needs no such package."""
    with SafetensorsSource(contents) as source:
        stored = {name: read_tensor(source, name) for name in source.entries}
    scales = {n.removesuffix(SCALE_SUFFIX): stored.pop(n) for n in list(stored) if n.endswith(SCALE_SUFFIX)}
    return {name: x.float() * scales[name].float() if name in scales else x for name, x in stored.items()}
