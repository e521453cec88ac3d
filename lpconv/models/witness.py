"""What transformers itself holds after opening a checkpoint, compared with lpconv's reading of the same files.

A verification that compares lpconv's reading with lpconv's reading cannot see that transformers opens another file,
renames, ties or drops a weight, or decodes it differently. So transformers opens the folder as its users would, and
every tensor is compared when it has been loaded, and then dropped: memory holds one at a time. Only compressed-tensors,
which decodes a loaded model, holds all of them.

Tensors are compared in the dtype in which transformers opens them, so lpconv's values are rounded to it once.
"""

import contextlib
import io
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from lpconv.errors import UnsupportedError, VerificationError
from lpconv.gguf import GGUF, WEIGHTS
from lpconv.layouts import READ
from lpconv.layouts.compressed_config import COMPRESSED_TENSORS
from lpconv.layouts.reader import StoredTensors
from lpconv.machine import out_of_memory
from lpconv.models.coded import CodedTensor
from lpconv.models.load import ONE_AT_A_TIME, load_from_files, missing_parameters
from lpconv.models.opening import error_line, model_errors
from lpconv.models.plugin import METHOD, register
from lpconv.models.tasks import architecture
from lpconv.progress import quiet_transformers
from lpconv.results import OpenedModel
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.header import quantization_method
from lpconv.storage.place import any_indirect

_LOADED = "_is_hf_initialized"  # set by transformers on tensors that it has read from files
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # makes transformers read a tensor when it is needed, not all ahead


def open_with_transformers(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> OpenedModel:
    """What transformers holds after opening a checkpoint, and where that differs from lpconv's reading of it.

    Residuals of Collage are left out, since transformers does not read them. Raises UnsupportedError if transformers
    has no reader for the layout or lacks a package, VerificationError if it has one and fails.
    """
    register()
    options = {"trust_remote_code": trust_remote_code}  # without it, transformers would ask on a terminal
    cls = architecture(checkpoint.config, trusted=checkpoint.directory if trust_remote_code else None)
    arguments = _reading_arguments(checkpoint)
    with quiet_transformers(), StoredTensors(checkpoint, None) as stored:
        with model_errors("no model can be built from it", hint="check that config.json belongs to the weights"):
            ours, missing = load_from_files(stored, model_class=cls, **options)
        values, right, wrong = ours.state_dict(), set[str](), set[str]()

        def compare(name: str, theirs: Tensor) -> None:
            (right if name in values and _is_equal(theirs, values[name], narrow) else wrong).add(name)

        is_whole = quantization_method(checkpoint.config) == COMPRESSED_TENSORS
        # In a narrower dtype compressed-tensors rounds the scales; it rounds experts to the config's dtype in any case.
        dtype, narrow = (torch.float32, ours.config.dtype) if is_whole else ("auto", None)
        try:
            with contextlib.ExitStack() as stack:
                if arguments or is_whole:
                    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # progress bars of packages
                if not is_whole:
                    stack.enter_context(_each_loaded(compare))
                model, report = cls.from_pretrained(
                    checkpoint.directory, dtype=dtype, output_loading_info=True, **arguments, **options
                )
                if is_whole:
                    model.hf_quantizer.compressor.decompress_model(model)
        except ImportError as e:
            raise UnsupportedError(f"transformers needs another package: {error_line(e)}", hint="install it") from e
        except Exception as e:  # transformers raises any exception for folders that it cannot open
            raise out_of_memory(e) or VerificationError(f"transformers cannot open it: {error_line(e)}") from e
        lacking, random = missing_parameters(cls, report), set(report["missing_keys"])
        theirs = model.state_dict()
        for name in values.keys() & theirs.keys() - random if is_whole else ():
            compare(name, theirs[name])
    initial = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or r"(?!)")  # may be absent from files
    not_compared = {n for n in values.keys() - wrong - random - _tied_to(model, right) if not initial.search(n)}
    return OpenedModel(
        model_class=type(model).__name__,
        num_tensors=len(values),
        missing=lacking,
        different=tuple(sorted({*wrong, *not_compared, *({*lacking} ^ {*missing})})),
    )


def _tied_to(model: nn.Module, names: Collection[str]) -> set[str]:
    """These tensors of a model, and those that are tied to one of them."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    same = {id(tensors[n]) for n in names if n in tensors}
    return {*names, *(n for n, x in tensors.items() if id(x) in same)}


def _reading_arguments(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments with which `from_pretrained` decodes this layout. Raises UnsupportedError if it has no reader."""
    method = quantization_method(checkpoint.config)
    if any_indirect(checkpoint.directory, checkpoint.weight_files):
        raise UnsupportedError("its files are packed or at a URL", hint="restore or download it")
    if method in (None, METHOD, COMPRESSED_TENSORS):
        return {}
    if method == GGUF:
        return {"gguf_file": WEIGHTS}
    if method in READ and READ[method].dequantizer:
        return {"quantization_config": getattr(transformers, READ[method].dequantizer)(dequantize=True)}
    raise UnsupportedError(f"transformers does not decode `{method}` on a CPU", hint="open it with its own runtime")


def _is_equal(theirs: Tensor, ours: Tensor, narrow: torch.dtype | None) -> bool:
    """Whether tensors are equal in the dtype of `theirs`, or once `ours` is rounded to `narrow`. NaN equals NaN."""
    if theirs.shape != ours.shape:
        return False
    ours = ours.decode() if isinstance(ours, CodedTensor) else ours
    rounded = (ours if narrow is None else ours.to(narrow) for narrow in dict.fromkeys((None, narrow)))
    theirs = theirs.float() if theirs.dtype == torch.float64 else theirs  # lpconv reads F64 as fp32
    return any(_same_numbers(theirs, x.to(theirs.dtype)) for x in rounded)


def _same_numbers(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all())


@contextlib.contextmanager
def _each_loaded(compare: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `compare` with each tensor that a model gets from files inside the context, by name, and drop its data.

    The model's own tensors, those that it initialises because the files lack them, and other threads are left alone.
    """
    parents, children, names, owner = set[nn.Module](), set[nn.Module](), dict[nn.Module, str](), threading.get_ident()

    def on_module(parent: nn.Module, name: str, child: Any) -> None:
        if threading.get_ident() == owner:
            parents.add(parent)
            children.add(child)

    def on_tensor(module: nn.Module, name: str, value: Any) -> Any:
        if threading.get_ident() != owner or not getattr(value, _LOADED, False) or value.is_meta:
            return None
        if module not in names:  # some modules are put into their parents without registration
            model = max(parents - children or {module}, key=lambda m: len(list(m.modules())))
            names.update((m, f"{n}." if n else "") for n, m in model.named_modules())
        compare(names.get(module, "") + name, value.detach())
        empty = torch.empty_like(value, device="meta")
        if isinstance(value, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=value.requires_grad)
        setattr(empty, _LOADED, True)
        return empty

    with ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        before = os.environ.get(_ONE_BY_ONE)
        for register_hook, hook in (
            (module_hooks.register_module_module_registration_hook, on_module),
            (module_hooks.register_module_parameter_registration_hook, on_tensor),
            (module_hooks.register_module_buffer_registration_hook, on_tensor),
        ):
            stack.callback(register_hook(hook).remove)
        os.environ[_ONE_BY_ONE] = "1"
        try:
            yield
        finally:
            os.environ.pop(_ONE_BY_ONE)
            if before is not None:
                os.environ[_ONE_BY_ONE] = before
