"""Open an output of any method as a model."""

from pathlib import Path
from typing import Any

import torch
import transformers

from lpconv.checkpoint.compressed import is_ours
from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.residual import RESIDUAL_INDEX
from lpconv.errors import UnsupportedError
from lpconv.forms.reader import StoredTensors
from lpconv.hf.plugin import register

__all__ = ["architecture", "load", "load_with_missing"]


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
    has_residual = (contents.directory / RESIDUAL_INDEX).exists()
    kwargs["output_loading_info"] = True
    if not has_residual and not is_ours(contents):
        model, info = cls.from_pretrained(contents.directory, dtype=dtype or "auto", **kwargs)
        return model.eval(), tuple(sorted(info["missing_keys"]))
    config = transformers.AutoConfig.from_pretrained(contents.directory)
    with StoredTensors.open(contents.directory) as stored:
        state = {name: stored.tensor(name) for name in stored.forms}
    default = torch.float32 if has_residual else config.dtype
    if not has_residual:
        del config.quantization_config
    model, info = cls.from_pretrained(None, config=config, state_dict=state, dtype=dtype or default, **kwargs)
    if model.can_generate() and (contents.directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(contents.directory)
    return model.eval(), tuple(sorted(info["missing_keys"]))


def architecture(config: dict[str, Any]) -> Any:
    """The transformers class that config.json's `architectures` names; AutoModel where it names none."""
    names = config.get("architectures") or []
    if not names:
        return transformers.AutoModel
    found = getattr(transformers, names[0], None)
    if found is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no class `{names[0]}`",
            hint="open it with the Auto class of your task and trust_remote_code=True",
        )
    return found
