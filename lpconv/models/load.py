"""Load the model of a checkpoint directory, including outputs of any method: whole, as codes, or by rows."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lpconv.errors import InputError
from lpconv.layouts import READ
from lpconv.layouts.reader import StoredTensors, open_readable, stored_shapes
from lpconv.models.coded import CodedTensor, save_as_codes
from lpconv.models.plugin import LOADER, register
from lpconv.models.rounded_inputs import InputRounding
from lpconv.models.tasks import architecture, resolve_auto_class
from lpconv.progress import quiet_transformers
from lpconv.report.numbers import code_list, plural
from lpconv.shards import placed_on
from lpconv.storage.checkpoint import RESIDUAL_INDEX, Checkpoint, Openable
from lpconv.storage.header import quantization_method
from lpconv.storage.place import any_indirect

# transformers patches its own classes while it loads: two loads at the same time leave models untied from then on.
ONE_AT_A_TIME = threading.RLock()


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
    with its residual added, in fp32 by default; with another `dtype` the sum is rounded to it. Third-party layouts that
    lpconv reads are decoded too, without their packages. Further arguments go to `from_pretrained`. Raises InputError
    if the residual does not belong to the weights, and if the files lack weights of the class that the config names,
    unless `allow_missing` leaves them random.

    With `resident`, weights stored as codes stay codes in memory, and are decoded to `dtype` on use
    (`models/coded.py`); the model runs, generates, and saves the same bytes again. Codes do not train, but adapters
    next to them can. Everything else is opened as usual: vectors, plain checkpoints, Collage's pairs.
    """
    dtype = kwargs.pop("torch_dtype", None) if dtype is None else dtype  # transformers' former name
    open_model = load_with_missing if not resident else load_resident
    with torch.inference_mode(False):  # transformers' threads never use that mode, and both kinds of tensors do not mix
        model, missing = open_model(path, dtype=dtype, model_class=model_class, **kwargs)
    if model_class is None and not allow_missing:
        _check_missing(model, missing)
    return model


def _check_missing(model: Any, missing: tuple[str, ...]) -> None:
    if missing:
        raise InputError(
            f"the files lack {plural(len(missing), 'weight')} of `{type(model).__name__}`: {code_list(missing)}",
            hint="download them again, or pass allow_missing=True to fill them with random numbers",
        )


def load_with_missing(
    path: Openable, *, dtype: torch.dtype | None = None, model_class: Any = None, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """`load`, plus the names of parameters that the checkpoint lacks and that are randomly initialised."""
    register()
    checkpoint = open_readable(path)
    stored_shapes(checkpoint)  # refuses pickles of layouts that lpconv cannot read
    cls = model_class or architecture(checkpoint.config, trusted=_code_directory(checkpoint, kwargs))
    has_residual = (checkpoint.directory / RESIDUAL_INDEX).exists()
    kwargs = {"trust_remote_code": False, **kwargs, "output_loading_info": True}  # False: never ask on a terminal
    is_indirect = any_indirect(checkpoint.directory, checkpoint.weight_files)
    if not (has_residual or is_indirect or quantization_method(checkpoint.config) in READ):
        with ONE_AT_A_TIME:
            try:
                model, info = cls.from_pretrained(checkpoint.directory, dtype=dtype or "auto", **kwargs)
            except RuntimeError as e:
                if "CONVERSION" not in str(e):
                    raise
                raise InputError("some weights cannot be decoded", hint="download the checkpoint again") from e
        return model.eval(), missing_parameters(cls, info)
    dtype = dtype or (torch.float32 if has_residual else None)
    with StoredTensors.open(checkpoint) as stored:
        return _build_model(stored, StoredTensors.tensor, model_class=cls, dtype=dtype, **kwargs)


def load_resident(
    path: Openable, *, dtype: torch.dtype | None, model_class: Any, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """`load_with_missing` without decoding codes."""
    checkpoint = Checkpoint.open(path)
    if quantization_method(checkpoint.config) is None:
        return load_with_missing(checkpoint, dtype=dtype, model_class=model_class, **kwargs)
    cls = model_class or architecture(checkpoint.config, trusted=_code_directory(checkpoint, kwargs))
    kwargs.setdefault("experts_implementation", "eager")  # processes one expert at a time
    with StoredTensors.open(checkpoint) as stored:
        model, missing = _build_model(stored, _coded_in_memory, model_class=cls, dtype=dtype, **kwargs)
        save_as_codes(model, stored.read_others())
    model.config.quantization_config = checkpoint.config["quantization_config"]
    if LOADER in str(getattr(model.config, "auto_map", "")):  # the loader, which `save_pretrained` does not copy
        del model.config.auto_map
    return model, missing


@contextmanager
def open_in_files(
    path: Openable, *, model_class: Any = None, rounds_inputs: bool = False, **kwargs: Any
) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Open the model in fp32 with its matrices left in the files; also returns the names of missing parameters.

    With `rounds_inputs`, inputs of its linear layers are rounded as the readers of the checkpoint round them. Further
    arguments are those of `load`.

    A layer uses the memory of a few of its rows while it multiplies by them, and every pass reads the files again. The
    model runs inside the context only.
    """
    with StoredTensors.open(path) as stored, quiet_transformers():
        cls = model_class or architecture(stored.checkpoint.config, trusted=_code_directory(stored.checkpoint, kwargs))
        how: dict[str, Any] = {"experts_implementation": "eager", "rounds_inputs": rounds_inputs, **kwargs}
        model, missing = load_from_files(stored, model_class=cls, **how)
        yield without_cache(model), missing


def without_cache(model: Any) -> Any:
    """The model, without a cache of keys and values in any of its parts: nothing is generated."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


@contextmanager
def open_as_served(path: Openable, *, in_files: bool = False, model_class: Any = None, **kwargs: Any) -> Iterator[Any]:
    """Open the model in fp32 with the inputs of its layers rounded as the readers of the checkpoint round them.

    Arguments and errors are those of `load`. A model with rounded inputs, or with `in_files`, is `open_in_files`.
    """
    with StoredTensors.open(path) as stored:
        rounds_inputs = any(stored.inputs_of(name) is not None for name in stored.forms)
    if not (in_files or rounds_inputs):
        yield load(path, dtype=torch.float32, model_class=model_class, **kwargs)
        return
    with open_in_files(path, model_class=model_class, rounds_inputs=True, **kwargs) as (model, missing):
        if model_class is None:
            _check_missing(model, missing)
        yield model


def load_rows(
    path: Openable, mesh: DeviceMesh, *, model_class: Any, **kwargs: Any
) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """The model in fp32 with this rank's rows as DTensors, sharded like FSDP2; values are those of `load_with_missing`.

    Also returns the names of parameters that the checkpoint lacks, and of matrices that this rank temporarily held
    whole. Buffers and missing parameters are whole too. transformers receives tensors that it can rename, stack and
    join without reading a number. Any other operation reads a whole tensor.
    """
    with StoredTensors.open(path) as stored:
        model, missing = load_from_files(stored, model_class=model_class, **kwargs)
        read_whole = {n for n, p in model.named_parameters() if p.ndim > 1 and not isinstance(p, CodedTensor)}
        _keep_rows(model, mesh)
    return model, missing, tuple(sorted(read_whole.difference(missing)))


def load_from_files(
    stored: StoredTensors, *, model_class: Any, rounds_inputs: bool = False, **kwargs: Any
) -> tuple[Any, tuple[str, ...]]:
    """The model in fp32 from open tensors, with matrices left in their files until they are used."""
    in_files = partial(_coded_in_files, rounds_inputs=rounds_inputs)
    return _build_model(stored, in_files, model_class=model_class, dtype=torch.float32, **kwargs)


def _build_model(
    stored: StoredTensors,
    tensor: Callable[[StoredTensors, str], Tensor],
    *,
    model_class: Any,
    dtype: torch.dtype | None,
    **kwargs: Any,
) -> tuple[Any, tuple[str, ...]]:
    """Build the model from open tensors, each as returned by `tensor`; also returns the names of missing ones.

    `dtype` defaults to the config's.
    """
    config, directory = copy.deepcopy(kwargs.pop("config", None)), stored.checkpoint.directory
    kwargs.setdefault("trust_remote_code", False)
    if config is None:
        config, kwargs = transformers.AutoConfig.from_pretrained(directory, return_unused_kwargs=True, **kwargs)
    state = {name: tensor(stored, name) for name in stored.forms}
    cls = resolve_auto_class(model_class, config)
    model, report = load_from_state(cls, config, state, dtype=dtype or config.dtype, **kwargs)
    if model.can_generate() and (directory / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model, missing_parameters(model_class, report)


def missing_parameters(model_class: Any, report: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters that transformers did not find, without the pooler that a bare AutoModel has by default."""
    names = sorted(report["missing_keys"])
    return tuple(n for n in names if model_class is not transformers.AutoModel or ".pooler." not in f".{n}")


def _coded_in_files(stored: StoredTensors, name: str, *, rounds_inputs: bool) -> Tensor:
    """A coded tensor that stays in its files; vectors and tensors that are not numbers are loaded."""
    form = stored.forms[name]
    if len(form.shape) < 2 or (form.is_kept and form.data[0].dtype not in ("F64", "F32", "F16", "BF16")):
        return stored.tensor(name)
    asked = stored.inputs_of(name) if rounds_inputs else None
    inputs = None if asked is None else InputRounding.of(*asked)
    return CodedTensor.from_form(form, {}, source=stored, inputs=inputs)


def _coded_in_memory(stored: StoredTensors, name: str) -> Tensor:
    """A coded tensor in memory for a matrix of codes; anything else is loaded."""
    form = stored.forms[name]
    if form.is_kept or len(form.shape) < 2:
        return stored.tensor(name)
    return CodedTensor.from_form(form, stored.read_components(name))


def _code_directory(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> Path | None:
    """The directory of the checkpoint's own Python code if it may run, else None."""
    return checkpoint.directory if kwargs.get("trust_remote_code") else None


def load_from_state(
    model_class: Any, config: Any, state: dict[str, Tensor], **kwargs: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Build the model of a class and config from decoded tensors by stored name; also returns transformers' report.

    transformers renames and merges them like tensors from files. The config's `quantization_config` is removed.
    """
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    kwargs["output_loading_info"] = True
    with ONE_AT_A_TIME:
        model, report = model_class.from_pretrained(None, config=config, state_dict=state, **kwargs)
    return model.eval(), report


def _keep_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every parameter by this rank's rows, in place; buffers stay whole and tied parameters stay tied."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and p not in replacements:
                replacements[p] = nn.Parameter(_shard(p.detach(), mesh), requires_grad=p.requires_grad)
            if p is not None:
                module._parameters[key] = replacements[p]
        coded = {key: x.decode() for key, x in module._buffers.items() if isinstance(x, CodedTensor)}
        module._buffers.update(coded)


def _shard(x: Tensor, mesh: DeviceMesh) -> Tensor:
    size = -(-len(x) // mesh.size())
    start, stop = (min(i * size, len(x)) for i in (mesh.get_local_rank(), mesh.get_local_rank() + 1))
    return placed_on(mesh, _rows(x, start, stop).to(mesh.device_type), x)


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    if start == stop:
        return torch.empty((0, *x.shape[1:]), dtype=x.dtype)
    if not isinstance(x, CodedTensor):
        return x[start:stop].clone()
    row = x.numel() // len(x)
    return x.part(start * row, stop * row, (stop - start, *x.shape[1:])).decode()
