"""The model in a checkpoint directory, an output of any method included."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lpconv.errors import InputError
from lpconv.forms import Kept
from lpconv.forms.decoded import stored_shapes
from lpconv.forms.foreign import READ
from lpconv.forms.reader import StoredTensors, open_readable
from lpconv.models.coded import CodedTensor, save_as_codes
from lpconv.models.plugin import LOADER, register
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import architecture, concrete
from lpconv.report.numbers import code_list, plural
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.storage.compressed import quantized_by
from lpconv.storage.place import any_pointer
from lpconv.storage.residual import RESIDUAL_INDEX


def load(
    path: Openable,
    *,
    dtype: torch.dtype | None = None,
    model_class: Any = None,
    resident: bool = False,
    allow_missing: bool = False,
    **kwargs: Any,
) -> Any:
    """The model in a checkpoint directory, in evaluation mode, of `model_class` or the class that its config names.

    Scaled checkpoints (unit, Scalify) are decoded into `dtype`, by default the source's. A Collage checkpoint is opened
    with its residual added back, in fp32 by default; with another `dtype` it is the sum rounded to it. The layouts of
    others that lpconv reads are decoded too, without their packages. Further arguments go to `from_pretrained`. Raises
    InputError where the residual does not belong to the weights, and for weights that the files lack of the class that
    the config names, unless `allow_missing` leaves them random.

    With `resident`, weights that are codes in the files stay codes in memory, and are decoded to `dtype` as they are
    used (`models/coded.py`); the model runs, generates, and saves the same bytes again, and does not train. What is not
    codes is opened as ever: vectors, plain checkpoints, Collage's pairs.
    """
    opened = load_with_missing if not resident else _load_resident
    with torch.inference_mode(False):  # threads of transformers are never in that mode, and both kinds do not mix
        model, missing = opened(path, dtype=dtype, model_class=model_class, **kwargs)
    if missing and model_class is None and not allow_missing:
        raise InputError(
            f"the files lack {plural(len(missing), 'weight')} of `{type(model).__name__}`: {code_list(missing)}",
            hint="fetch them again; allow_missing=True opens the model with random numbers in their place",
        )
    return model


def load_with_missing(
    path: Openable, *, dtype: torch.dtype | None = None, model_class: Any = None, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """`load`, and the names of the parameters that the checkpoint does not hold: they are freshly initialised."""
    register()
    checkpoint = open_readable(path)
    stored_shapes(checkpoint)  # of layouts that are read, which pickles say only now
    cls = model_class or architecture(checkpoint.config, trusted=_trusted(checkpoint, kwargs))
    has_residual = (checkpoint.directory / RESIDUAL_INDEX).exists()
    kwargs["output_loading_info"] = True
    is_elsewhere = any_pointer(checkpoint.directory, checkpoint.weight_files)
    if not (has_residual or is_elsewhere or quantized_by(checkpoint.config) in READ):
        model, info = cls.from_pretrained(checkpoint.directory, dtype=dtype or "auto", **kwargs)
        return model.eval(), missing_of(cls, info)
    dtype = dtype or (torch.float32 if has_residual else None)
    with StoredTensors.open(checkpoint) as stored:
        return _assembled(checkpoint, stored, StoredTensors.tensor, model_class=cls, dtype=dtype, **kwargs)


def _load_resident(
    path: Openable, *, dtype: torch.dtype | None, model_class: Any, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """`load_with_missing`, with codes that stay what they are."""
    checkpoint = Checkpoint.open(path)
    if quantized_by(checkpoint.config) is None:
        return load_with_missing(checkpoint, dtype=dtype, model_class=model_class, **kwargs)
    cls = model_class or architecture(checkpoint.config, trusted=_trusted(checkpoint, kwargs))
    kwargs.setdefault("experts_implementation", "eager")  # which takes one at a time
    with StoredTensors.open(checkpoint) as stored:
        model, missing = _assembled(checkpoint, stored, _resident, model_class=cls, dtype=dtype, **kwargs)
        save_as_codes(model, stored.others())
    model.config.quantization_config = checkpoint.config["quantization_config"]
    if LOADER in str(getattr(model.config, "auto_map", "")):  # which `save_pretrained` does not copy
        del model.config.auto_map
    return model, missing


@contextmanager
def open_in_files(path: Openable) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The model in fp32 whose matrices stay in its files, and the parameters that these do not hold.

    A layer takes the memory of a few of its rows, for as long as it multiplies by them, and every pass reads the files
    again. The model runs inside the context only.
    """
    checkpoint = Checkpoint.open(path)
    with StoredTensors.open(checkpoint) as stored, quiet_transformers():
        cls = architecture(checkpoint.config)
        model, missing = from_files(checkpoint, stored, model_class=cls, experts_implementation="eager")
        model.config.use_cache = False  # keys and values of past tokens would be kept for nothing
        yield model, missing


def from_files(
    checkpoint: Checkpoint, stored: StoredTensors, *, model_class: Any, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """The model in fp32 of open tensors, whose matrices stay in their files until somebody reads them."""
    return _assembled(checkpoint, stored, _in_files, model_class=model_class, dtype=torch.float32, **kwargs)


def _assembled(
    checkpoint: Checkpoint,
    stored: StoredTensors,
    tensor: Callable[[StoredTensors, str], Tensor],
    *,
    model_class: Any,
    dtype: torch.dtype | None,
    **kwargs: Any,
) -> tuple[Any, tuple[str, ...]]:
    """The model of open tensors, each as `tensor` gives it, in a dtype or the config's; and what is missing."""
    config = copy.deepcopy(kwargs.pop("config", None))
    if config is None:
        config, kwargs = transformers.AutoConfig.from_pretrained(
            checkpoint.directory, return_unused_kwargs=True, **kwargs
        )
    state = {name: tensor(stored, name) for name in stored.forms}
    cls = concrete(model_class, config)
    model, report = from_state(cls, config, state, dtype=dtype or config.dtype, **kwargs)
    if model.can_generate() and (checkpoint.directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint.directory)
    return model, missing_of(model_class, report)


def missing_of(model_class: Any, report: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that transformers did not find. A bare model that nobody named has hidden states without the
    pooler that it has by default."""
    names = sorted(report["missing_keys"])
    return tuple(n for n in names if model_class is not transformers.AutoModel or ".pooler." not in f".{n}")


def _in_files(stored: StoredTensors, name: str) -> Tensor:
    """A tensor as it is in such a model: what is no matrix of numbers is in memory."""
    form = stored.forms[name]
    if len(form.shape) < 2 or (isinstance(form, Kept) and form.dtype not in ("F64", "F32", "F16", "BF16")):
        return stored.tensor(name)
    return CodedTensor.in_files(stored, name)


def _resident(stored: StoredTensors, name: str) -> Tensor:
    """A tensor as it stays in memory: matrices of codes as codes."""
    form = stored.forms[name]
    if isinstance(form, Kept) or len(form.shape) < 2:
        return stored.tensor(name)
    return CodedTensor.whole(form, stored.parts(name))


def _trusted(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> Path | None:
    """Where the checkpoint's own Python code lies, where it may run."""
    return checkpoint.directory if kwargs.get("trust_remote_code") else None


def from_state(model_class: Any, config: Any, state: dict[str, Tensor], **kwargs: Any) -> tuple[Any, Mapping[str, Any]]:
    """The model of a class and config with decoded tensors, by their names in a checkpoint; and transformers' report.

    transformers renames and merges them as it does those of files. `config` loses what it says of codes.
    """
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    kwargs["output_loading_info"] = True
    model, report = model_class.from_pretrained(None, config=config, state_dict=state, **kwargs)
    return model.eval(), report
